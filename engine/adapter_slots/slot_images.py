"""Fills an adapter's slot from one image.

SGLang fills a slot tensor by tensor: hundreds of small steps in Python that look up names, slice and page-lock memory.
That takes 10 ms and more each time an adapter returns to a slot, and no batch runs meanwhile. A packed adapter is an
image of its slot: one transfer to the device, then grouped copies into the slot's buffers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MAX_LAYOUTS = 8  # cached; adapters of the same rank and modules share one


@dataclass(frozen=True, slots=True)
class Region:
    """A matrix of an image and its destination in one buffer's slot. Sizes and steps count elements."""

    buffer: int
    shape: tuple[int, int]
    source: int  # of its first element in the image
    source_step: int  # from row to row in the image; within a row it is dense
    target: int  # of its first element in the buffer's slot
    target_step: int


@dataclass(frozen=True, slots=True)
class SlotImage:
    """An adapter's content of a slot. Buffers without a region become zero."""

    data: torch.Tensor  # flat, in host memory
    regions: tuple[Region, ...]  # images with the same regions share one object


class SlotFiller:
    """Fills the slots of a pool of buffers, each a tensor [S, …] with one entry per slot."""

    def __init__(self, buffers: Sequence[torch.Tensor], max_image: int) -> None:
        """`max_image`: elements of the largest image."""
        self._buffers = tuple(buffers)
        [self.dtype] = {buffer.dtype for buffer in buffers}
        self._layouts: OrderedDict[int, _Layout] = OrderedDict()  # by id of their regions, in LRU order
        self._whole: dict[int, list[torch.Tensor]] = {}  # views of every buffer, by slot
        # Staging buffer on the device. Copies of one stream run in order, so the next image may overwrite it.
        self._staging = torch.empty(max_image, dtype=self.dtype, device=buffers[0].device)

    def fill(self, slot: int, image: SlotImage) -> None:
        """Copy an image into a slot, up to the adapter's rank; kernels read no further."""
        key = id(image.regions)
        if key not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.popitem(last=False)
            self._layouts[key] = _Layout(self._buffers, image.regions, self._staging)
        self._layouts.move_to_end(key)
        self._staging[: len(image.data)].copy_(image.data, non_blocking=True)
        self._layouts[key].fill(slot)

    def clear(self, slot: int) -> None:
        """Zero every buffer of a slot."""
        if slot not in self._whole:
            self._whole[slot] = [buffer[slot] for buffer in self._buffers]
        torch._foreach_zero_(self._whole[slot])


class _Layout:
    """Views of the staging buffer and of slots, shared by images with the same regions."""

    def __init__(self, buffers: Sequence[torch.Tensor], regions: tuple[Region, ...], staging: torch.Tensor) -> None:
        self.regions = regions  # keeps the object alive: its id is the cache key
        self._buffers = buffers
        written = {region.buffer for region in regions}
        self._unwritten = [buffer for number, buffer in enumerate(buffers) if number not in written]
        # One strided tensor degrades a grouped copy to one copy per tensor. B is strided below the largest rank.
        self._groups = [
            (group, [torch.as_strided(staging, r.shape, (r.source_step, 1), r.source) for r in group])
            for is_dense in (True, False)
            if (group := [r for r in regions if _is_dense(r) == is_dense])
        ]
        self._targets: dict[int, list[list[torch.Tensor]]] = {}  # by slot, one list per group

    def fill(self, slot: int) -> None:
        for targets, (_, sources) in zip(self._targets_in(slot), self._groups, strict=True):
            torch._foreach_copy_(targets, sources)
        if self._unwritten:
            torch._foreach_zero_([buffer[slot] for buffer in self._unwritten])

    def _targets_in(self, slot: int) -> list[list[torch.Tensor]]:
        if slot not in self._targets:
            self._targets[slot] = [[self._target(region, slot) for region in group] for group, _ in self._groups]
        return self._targets[slot]

    def _target(self, region: Region, slot: int) -> torch.Tensor:
        buffer = self._buffers[region.buffer]
        offset = slot * buffer.stride(0) + region.target
        return torch.as_strided(buffer, region.shape, (region.target_step, 1), offset)


def _is_dense(region: Region) -> bool:
    """Whether the region is contiguous in the image and in the buffer."""
    rows, columns = region.shape
    return rows == 1 or region.source_step == region.target_step == columns
