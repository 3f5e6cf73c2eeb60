"""Packed adapters in an engine: mapped from a file in shared memory, copied into slots.

A load reads only the file's header. Every tensor-parallel rank reads the tensors from the same mapped memory when the
adapter gets a slot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from adapters.errors import AdapterIncompatible, AdapterUnsupported
from adapters.model.base_model import BaseModel
from adapters.model.serving import EXPERTS_NOT_SERVED
from adapters.packed import PACKED_NAME, PackedMetadata, kept_directory, read_packed
from adapters.packed.fused_layout import PARTS_OF
from engine.adapter_slots.fill_stream import FillStream
from engine.adapter_slots.kept_files import KeptFiles
from engine.adapter_slots.reft import ReftFactors
from engine.adapter_slots.slot_images import Region, SlotFiller, SlotImage

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """Replaces SGLang's `LoRAAdapter`, of which its manager and pool read `config` and `scaling`."""

    config: Any  # SGLang's LoRAConfig
    image: SlotImage
    reft: ReftFactors | None
    directory: Path
    mapped: torch.Tensor  # the whole file
    filled: torch.cuda.Event | None  # the latest copy to a slot; None on a CPU, which copies at once
    scaling: float = 1.0  # it is folded into the weights


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of B and the columns of A of an engine module that belong to this tensor-parallel rank."""

    rows: tuple[range, ...]
    columns: range


class PackedLoader:
    """Maps packed files for one pool of slots."""

    def __init__(
        self,
        buffers: Mapping[tuple[str, str, int], torch.Tensor],
        base: BaseModel,
        max_rank: int,
        shares: Mapping[str, Share] | None,
    ) -> None:
        """`buffers`: (module, "a" or "b", layer) -> [S, rows, columns]. `shares`: None without tensor parallelism."""
        self._number_of = {key: number for number, key in enumerate(buffers)}
        self._buffers = tuple(buffers.values())
        self._base = base
        self._shares = shares
        self._regions: dict[tuple[Any, ...], tuple[Region, ...]] = {}
        modules = {module for module, _, _ in buffers}
        widths = sum(len(PARTS_OF[module]) * base.shape_of(module)[1] + base.shape_of(module)[0] for module in modules)
        self.filler = SlotFiller(self._buffers, base.num_layers * max_rank * widths)
        device = self._buffers[0].device
        self.stream = FillStream(device)
        # Page-locking takes milliseconds per adapter, so a thread does it. Until then copies to the GPU are slow.
        self._on_gpu = device.type == "cuda"
        self._page_locker = (
            ThreadPoolExecutor(1, "page-lock", torch.cuda.set_device, (device,)) if self._on_gpu else None
        )
        self._kept = KeptFiles(self._release)

    def load(self, directory: Path, config: Any) -> PackedAdapter:
        """Map a directory's packed file. Raises AdapterError if this engine cannot serve it."""
        path = directory / PACKED_NAME
        packed = read_packed(path)
        packed.check_fits(self._base)
        if packed.metadata.experts is not None:
            raise AdapterUnsupported(f"revision {packed.metadata.revision_id} cannot be loaded: {EXPERTS_NOT_SERVED}")
        dtype = _DTYPES[packed.metadata.dtype]
        if dtype != self.filler.dtype:
            raise AdapterIncompatible(f"{path} is packed for {dtype}, and the engine runs in {self.filler.dtype}")
        num_bytes = path.stat().st_size
        mapped = self._kept.take(path, num_bytes)
        is_locked = mapped is not None
        if mapped is None:
            mapped = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        data = mapped[num_bytes - packed.num_bytes : num_bytes].view(dtype)
        places, begin = {}, 0
        for name, array in sorted(packed.tensors.items()):  # in the order of the file
            places[name] = range(begin, begin + array.size)
            begin += array.size
        tensors = {name: data[p.start : p.stop].view(packed.tensors[name].shape) for name, p in places.items()}
        # Sizes follow from the base model, so adapters of the same rank, modules and layers share their regions.
        layout = (packed.metadata.lora_rank, *((name, m.layers) for name, m in packed.metadata.modules.items()))
        if layout not in self._regions:
            try:
                self._regions[layout] = tuple(self._regions_of(packed.metadata, tensors, places))
            except BaseException:
                if is_locked:
                    self._release(mapped)
                raise
        num_lora = sum(len(place) for name, place in places.items() if name.startswith("lora."))
        if self._page_locker is not None and not is_locked:
            self._page_locker.submit(_page_lock, mapped)
        return PackedAdapter(
            config,
            SlotImage(data[:num_lora], self._regions[layout]),
            _reft_of(packed.metadata, tensors),
            directory,
            mapped,
            torch.cuda.Event() if self._on_gpu else None,
        )

    def note_filled(self, adapter: PackedAdapter) -> None:
        """Call it after the adapter's copies to a slot were given to the current stream."""
        if adapter.filled is not None:
            adapter.filled.record()

    def unload(self, adapter: PackedAdapter) -> None:
        """Release what `load` acquired, or keep it if the agent keeps the file to write another adapter into it."""
        if adapter.filled is not None:
            adapter.filled.synchronize()  # the device may still read the file; it was filled some batches ago
        kept = kept_directory(adapter.directory)
        if kept.is_dir():
            self._kept.keep(kept / PACKED_NAME, adapter.mapped)
        else:
            self._release(adapter.mapped)
        self._kept.release_deleted()

    def _release(self, mapped: torch.Tensor) -> None:
        if self._page_locker is not None:
            self._page_locker.submit(_page_unlock, mapped)

    def _regions_of(
        self, metadata: PackedMetadata, tensors: Mapping[str, torch.Tensor], places: Mapping[str, range]
    ) -> Iterator[Region]:
        for module, place in metadata.modules.items():
            for factor in "ab":
                name = f"lora.{module}.{factor}"
                _, num_rows, num_columns = tensors[name].shape
                for number, layer in enumerate(place.layers):
                    buffer = self._number_of.get((module, factor, layer))
                    if buffer is None:
                        raise AdapterIncompatible(
                            f"revision {metadata.revision_id} adapts {module}, and the engine has no slots for it"
                        )
                    begin = places[name].start + number * num_rows * num_columns
                    yield from self._placed(module, factor, buffer, begin, num_rows, num_columns)

    def _placed(
        self, module: str, factor: str, buffer: int, begin: int, num_rows: int, num_columns: int
    ) -> Iterator[Region]:
        """This rank's part of a matrix: one region per range of rows."""
        rows: tuple[range, ...] = (range(num_rows),)
        columns = range(num_columns)
        if self._shares is not None and factor == "a":
            columns = self._shares[module].columns
        elif self._shares is not None:
            rows = self._shares[module].rows
        step, target = self._buffers[buffer].shape[2], 0
        for each in rows:
            source = begin + each.start * num_columns + columns.start
            yield Region(buffer, (len(each), len(columns)), source, num_columns, target, step)
            target += len(each) * step


def _reft_of(metadata: PackedMetadata, tensors: Mapping[str, torch.Tensor]) -> ReftFactors | None:
    if metadata.reft is None:
        return None
    return ReftFactors(torch.tensor(metadata.reft.layers), tensors["reft.a"], tensors["reft.b"], tensors["reft.bias"])


def share_of(module: Any, num_rows: int, num_columns: int) -> Share:
    """This rank's share of a module, as SGLang's wrapper slices B of `num_rows` rows and A of `num_columns` columns."""
    rows = module.slice_lora_b_weights(torch.arange(num_rows).unsqueeze(1))[:, 0].tolist()
    columns = module.slice_lora_a_weights(torch.arange(num_columns).unsqueeze(0))[0].tolist()
    [column_range] = _ranges(columns)
    return Share(tuple(_ranges(rows)), column_range)


def _ranges(numbers: Sequence[int]) -> list[range]:
    """Numbers as a list of contiguous ranges."""
    found = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        found.append(range(members[0], members[-1] + 1))
    return found


def _page_lock(mapped: torch.Tensor) -> None:
    if error := int(torch.cuda.cudart().cudaHostRegister(mapped.data_ptr(), mapped.numel(), 0)):
        log.warning("page-locking of an adapter failed: CUDA error %d; its copies to slots will be slow", error)


def _page_unlock(mapped: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(mapped.data_ptr())
