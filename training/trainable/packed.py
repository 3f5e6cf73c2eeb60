"""An adapter in training as engines load it: packed on its device, and copied to this host once."""

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from adapters.files.digest import sha256_of_chunks
from adapters.formats.safetensors_file import STORAGE_DTYPES, header_of
from adapters.model.manifest import LoraEntry, Manifest, ReftEntry, revision_id_of_packed
from adapters.model.normal_form import Positions
from adapters.model.serving import EngineDtype
from adapters.packed.fused_layout import PARTS_OF, part_shapes
from adapters.packed.metadata import CHUNKED, DTYPE_CODES, PackedMetadata, PackedModule, PackedReft
from training.errors import AdapterUntrainable
from training.trainable.adapter import TrainableAdapter
from training.trainable.factors import ServedFactors


@dataclass(frozen=True, slots=True, eq=False)
class ServedWeights:
    """What an adapter computes with when a forward pass applies it. Later steps do not change it."""

    manifest: Manifest
    dtype: EngineDtype
    modules: Mapping[str, PackedModule]
    reft: PackedReft | None
    shapes: Mapping[str, tuple[int, ...]]  # of the tensors, in the order of the file
    data: memoryview  # their bytes
    changes_nothing: bool  # it is LoRA that has not been trained: its factors B are 0

    @property
    def num_bytes(self) -> int:
        """Of the packed file."""
        return len(self._headed("0" * 64)) + len(self.data)  # however the digest reads

    def write(self, mapped: mmap.mmap) -> None:
        """Write the packed file into a mapping of its size: threads copy into it, while `write` would lock the file."""
        begin = len(mapped) - len(self.data)

        def copy(at: int, chunk: memoryview) -> None:
            np.copyto(np.frombuffer(mapped, np.uint8, len(chunk), begin + at), np.frombuffer(chunk, np.uint8))

        digest = sha256_of_chunks(self.data, copy)
        mapped[:begin] = self._headed(digest)

    def _headed(self, tensors_sha256: str) -> bytes:
        """The file's header."""
        code, item_bytes = DTYPE_CODES[self.dtype], np.dtype(STORAGE_DTYPES[self.dtype]).itemsize
        sizes = {name: (code, shape, math.prod(shape) * item_bytes) for name, shape in self.shapes.items()}
        return header_of(sizes, self._metadata(tensors_sha256))

    def _metadata(self, tensors_sha256: str) -> dict[str, str]:
        manifest = self.manifest.to_json()
        return PackedMetadata(
            revision_id=revision_id_of_packed(manifest, tensors_sha256),
            dtype=self.dtype,
            positions=cast(Positions, self.manifest.positions),
            base_fingerprint=self.manifest.base_model,
            lora_rank=self.manifest.max_rank if self.modules else 0,
            modules=self.modules,
            reft=self.reft,
            tensors_sha256=tensors_sha256,
            manifest=manifest,
            format=CHUNKED,
        ).to_header()


@torch.no_grad()
def served_weights(adapter: TrainableAdapter, dtype: torch.dtype) -> ServedWeights:
    """The adapter as it is now. Raises AdapterUntrainable if a value does not fit the dtype."""
    name = cast(EngineDtype, str(dtype).removeprefix("torch."))
    lora = {(layer, module): factors.served(dtype) for layer, module, factors in adapter.lora()}
    reft = {layer: factors.served(dtype) for layer, factors in adapter.reft()}
    modules, tensors = _packed_lora(adapter, lora)
    packed_reft = None
    if reft:
        packed_reft = PackedReft(tuple(reft), (adapter.spec.rank,) * len(reft))
        tensors |= _packed_reft(list(reft.values()))
    pieces = [piece.reshape(-1) for _, (_, own) in sorted(tensors.items()) for piece in own]
    whole = torch.cat(pieces)
    if not torch.stack(whole.aminmax()).isfinite().all():
        raise AdapterUntrainable(f"the adapter has values that are too large for {name}; train with smaller steps")
    changes_nothing = not reft and not any(bool(factors.b.any()) for factors in lora.values())
    rank, base = adapter.spec.rank, adapter.base
    manifest = Manifest(
        base.fingerprint,
        ("reft",) if reft else ("lora",),
        adapter.positions,
        tuple(LoraEntry(*place, rank, f.a.shape[1], f.b.shape[1], 1.0, name) for place, f in sorted(lora.items())),
        tuple(ReftEntry(layer, rank, base.hidden, 1.0, name) for layer in reft),
    )
    shapes = {tensor: shape for tensor, (shape, _) in sorted(tensors.items())}
    return ServedWeights(manifest, name, modules, packed_reft, shapes, _on_host(whole), changes_nothing)


_Pieces = tuple[tuple[int, ...], Sequence[torch.Tensor]]  # a tensor's shape, and what it is put together from


def _packed_lora(
    adapter: TrainableAdapter, lora: Mapping[tuple[int, str], ServedFactors]
) -> tuple[dict[str, PackedModule], dict[str, _Pieces]]:
    """A and B of the engine modules, each part of a module with the adapter's rank."""
    modules: dict[str, PackedModule] = {}
    tensors: dict[str, _Pieces] = {}
    for name, parts in PARTS_OF.items():
        if not (layers := sorted({layer for layer, part in lora if part in parts})):
            continue
        shapes, some, rank = part_shapes(adapter.base, name), next(iter(lora.values())).a, adapter.spec.rank
        rows = tuple(size_out for size_out, _ in shapes)
        absent = {
            part: ServedFactors(some.new_zeros(rank, size_in), some.new_zeros(rank, size_out), None)
            for part, (size_out, size_in) in zip(parts, shapes, strict=True)
        }
        placed = [lora.get((layer, part), absent[part]) for layer in layers for part in parts]
        modules[name] = PackedModule(tuple(layers), rows)
        shape_a = (len(layers), len(parts) * rank, shapes[0][1])
        tensors[f"lora.{name}.a"] = shape_a, [each.a for each in placed]
        tensors[f"lora.{name}.b"] = (len(layers), sum(rows), rank), [each.b.T for each in placed]
    return modules, tensors


def _packed_reft(factors: Sequence[ServedFactors]) -> dict[str, _Pieces]:
    count, (rank, hidden) = len(factors), factors[0].a.shape
    return {
        "reft.a": ((count, rank, hidden), [each.a for each in factors]),
        "reft.b": ((count, hidden, rank), [each.b.T for each in factors]),
        "reft.bias": ((count, rank), [each.bias for each in factors if each.bias is not None]),
    }


def _on_host(whole: torch.Tensor) -> memoryview:
    """Its bytes. From a GPU into page-locked memory, which torch keeps for the next time."""
    copy = whole.to("cpu", non_blocking=True)
    if whole.is_cuda:
        torch.cuda.current_stream().synchronize()
    return memoryview(copy.view(torch.uint8).numpy())
