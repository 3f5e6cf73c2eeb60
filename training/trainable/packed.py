"""An adapter in training as engines load it: packed on its device, and copied to this host once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch

from adapters.formats.safetensors_file import STORAGE_DTYPES, StreamedTensor, write_streamed
from adapters.model.manifest import LoraEntry, Manifest, ReftEntry, revision_id_of_packed
from adapters.model.serving import EngineDtype
from adapters.packed.fused_layout import PARTS_OF, part_shapes
from adapters.packed.metadata import DTYPE_CODES, PackedMetadata, PackedModule, PackedReft
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
    arrays: Mapping[str, np.ndarray]  # as `PackedRevision` has them

    @property
    def changes_nothing(self) -> bool:
        """Whether it is LoRA that has not been trained: its factors B are 0."""
        return not self.reft and not any(array.any() for name, array in self.arrays.items() if name.endswith(".b"))

    def write(self, path: Path) -> None:
        """Write the packed file. Raises OSError."""
        storage = STORAGE_DTYPES[self.dtype]
        tensors = {
            name: StreamedTensor(each.shape, storage, partial(iter, (each,))) for name, each in self.arrays.items()
        }
        write_streamed(path, DTYPE_CODES[self.dtype], tensors, self._header)

    def _header(self, tensors_sha256: str) -> dict[str, str]:
        manifest = self.manifest.to_json()
        return PackedMetadata(
            revision_id=revision_id_of_packed(manifest, tensors_sha256),
            dtype=self.dtype,
            positions=self.manifest.positions,
            base_fingerprint=self.manifest.base_model,
            lora_rank=self.manifest.max_rank if self.modules else 0,
            modules=self.modules,
            reft=self.reft,
            tensors_sha256=tensors_sha256,
            manifest=manifest,
        ).to_header()


@torch.no_grad()
def served_weights(adapter: TrainableAdapter, dtype: torch.dtype) -> ServedWeights:
    """The adapter as it is now. Raises AdapterUntrainable if a value does not fit the dtype."""
    name = cast(EngineDtype, str(dtype).removeprefix("torch."))
    lora = {(layer, module): factors.served(dtype) for layer, module, factors in adapter.lora()}
    reft = {layer: factors.served(dtype) for layer, factors in adapter.reft()}
    modules, tensors = _packed_lora(adapter, lora)
    if reft:
        tensors |= _packed_reft(list(reft.values()))
    if not torch.stack([value for each in tensors.values() for value in each.aminmax()]).isfinite().all():
        raise AdapterUntrainable(f"the adapter has values that are too large for {name}; train with smaller steps")
    rank, base = adapter.spec.rank, adapter.base
    manifest = Manifest(
        base.fingerprint,
        ("reft",) if reft else ("lora",),
        adapter.positions,
        tuple(LoraEntry(*place, rank, f.a.shape[1], f.b.shape[1], 1.0, name) for place, f in sorted(lora.items())),
        tuple(ReftEntry(layer, rank, base.hidden, 1.0, name) for layer in reft),
    )
    packed_reft = PackedReft(tuple(reft), (rank,) * len(reft)) if reft else None
    return ServedWeights(manifest, name, modules, packed_reft, _on_host(tensors, STORAGE_DTYPES[name]))


def _packed_lora(
    adapter: TrainableAdapter, lora: Mapping[tuple[int, str], ServedFactors]
) -> tuple[dict[str, PackedModule], dict[str, torch.Tensor]]:
    """A and B of the engine modules, each part of a module with the adapter's rank."""
    modules, tensors = {}, {}
    for name, parts in PARTS_OF.items():
        if not (layers := sorted({layer for layer, part in lora if part in parts})):
            continue
        shapes, some = part_shapes(adapter.base, name), next(iter(lora.values())).a
        rows, rank = tuple(size_out for size_out, _ in shapes), adapter.spec.rank
        absent = {
            part: ServedFactors(some.new_zeros(rank, size_in), some.new_zeros(rank, size_out), None)
            for part, (size_out, size_in) in zip(parts, shapes, strict=True)
        }
        placed = [lora.get((layer, part), absent[part]) for layer in layers for part in parts]
        modules[name] = PackedModule(tuple(layers), rows)
        tensors[f"lora.{name}.a"] = torch.cat([each.a for each in placed]).view(len(layers), len(parts) * rank, -1)
        tensors[f"lora.{name}.b"] = torch.cat([each.b.T for each in placed]).view(len(layers), sum(rows), rank)
    return modules, tensors


def _packed_reft(factors: Sequence[ServedFactors]) -> dict[str, torch.Tensor]:
    return {
        "reft.a": torch.stack([each.a for each in factors]),
        "reft.b": torch.stack([each.b.T for each in factors]),
        "reft.bias": torch.stack([each.bias for each in factors if each.bias is not None]),
    }


def _on_host(tensors: Mapping[str, torch.Tensor], storage: str) -> dict[str, np.ndarray]:
    """From a GPU all at once, into page-locked memory, which torch keeps for the next time."""
    copies = {name: each.to("cpu", non_blocking=True) for name, each in tensors.items()}
    if any(each.is_cuda for each in tensors.values()):
        torch.cuda.current_stream().synchronize()
    return {name: each.view(torch.uint8).numpy().view(storage) for name, each in copies.items()}
