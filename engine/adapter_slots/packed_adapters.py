"""Packed adapters in an engine: mapped from a file in shared memory, copied into slots.

A load reads only the file's header. Every tensor-parallel rank reads the tensors from the same mapped memory when the
adapter gets a slot.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adapters.errors import AdapterIncompatible, AdapterUnsupported
from adapters.model.base_model import BaseModel
from adapters.model.serving import why_experts_are_refused
from adapters.packed import PACKED_NAME, PackedMetadata, kept_directory, read_packed
from engine.adapter_slots.fill_stream import FillStream
from engine.adapter_slots.kept_files import KeptFiles
from engine.adapter_slots.reft import ReftFactors
from engine.adapter_slots.slot_images import Region, SlotFiller, SlotImage
from engine.adapter_slots.slot_places import Share, SlotPlaces

log = logging.getLogger(__name__)

_MAX_LAYOUTS = 64  # kept; adapters on other experts of other layers have other layouts
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
    has_experts: bool = False  # LoRA on experts
    scaling: float = 1.0  # it is folded into the weights


class PackedLoader:
    """Maps packed files for one pool of slots."""

    def __init__(
        self,
        buffers: Mapping[tuple[str, str, int], torch.Tensor],
        base: BaseModel,
        max_rank: int,
        shares: Mapping[str, Share] | None,
    ) -> None:
        """`buffers`: (module, "a" or "b", layer) -> [S, rows, columns], of experts [S, experts, rows, columns].

        `max_rank` is that of projections; experts have their own, which their buffers tell. `shares`: None without
        tensor parallelism.
        """
        self._base = base
        self._places = SlotPlaces(buffers, base, shares)
        self._regions: dict[tuple[Any, ...], tuple[Region, ...]] = {}  # by layout
        self.filler = SlotFiller(tuple(buffers.values()), self._places.largest_piece(max_rank))
        device = next(iter(buffers.values())).device
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
        self._check_experts(packed.metadata)
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
        layout = _layout_of(packed.metadata)
        if layout not in self._regions:
            if len(self._regions) >= _MAX_LAYOUTS:
                self._regions.pop(next(iter(self._regions)))
            try:
                self._regions[layout] = tuple(self._places.regions_of(packed.metadata, tensors, places))
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
            packed.metadata.experts is not None,
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

    def _check_experts(self, metadata: PackedMetadata) -> None:
        if metadata.experts is None:
            return
        if why := why_experts_are_refused(metadata.experts.rank, self._places.expert_rank):
            error = AdapterIncompatible if self._places.expert_rank else AdapterUnsupported
            raise error(f"revision {metadata.revision_id} cannot be loaded: {why}")


def _layout_of(metadata: PackedMetadata) -> tuple[Any, ...]:
    """What an adapter's regions depend on. Other sizes follow from the base model."""
    return tuple((name, module.layers, module.experts, rank) for name, module, rank in metadata.all_modules)


def _reft_of(metadata: PackedMetadata, tensors: Mapping[str, torch.Tensor]) -> ReftFactors | None:
    if metadata.reft is None:
        return None
    return ReftFactors(torch.tensor(metadata.reft.layers), tensors["reft.a"], tensors["reft.b"], tensors["reft.bias"])


def _page_lock(mapped: torch.Tensor) -> None:
    if error := int(torch.cuda.cudart().cudaHostRegister(mapped.data_ptr(), mapped.numel(), 0)):
        log.warning("page-locking of an adapter failed: CUDA error %d; its copies to slots will be slow", error)


def _page_unlock(mapped: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(mapped.data_ptr())
