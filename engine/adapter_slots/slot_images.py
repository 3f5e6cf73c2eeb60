"""Filling an adapter's slot at once.

SGLang fills a slot tensor by tensor, hundreds of small steps in Python for each of which it looks up names, slices and
page-locks memory: ten milliseconds and more, each time an adapter returns to a slot, while no batch runs. A packed
adapter is an image of its slot: one transfer to the device and, there, grouped copies to where it belongs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MOST_LAYOUTS = 8  # whose views into slots are kept: adapters of the same rank and modules share one


@dataclass(frozen=True, slots=True)
class Region:
    """A matrix of an image and its place: part of one buffer's slot. Sizes and steps are elements."""

    buffer: int
    shape: tuple[int, int]
    source: int  # of its first element in the image
    source_step: int  # from row to row in the image; within a row it is dense
    target: int  # of its first element in the buffer's slot
    target_step: int


@dataclass(frozen=True, slots=True)
class SlotImage:
    """All that an adapter has in a slot. Buffers without a region are zero."""

    data: torch.Tensor  # flat, in host memory
    regions: tuple[Region, ...]  # one object for all images that have the same


class SlotFiller:
    """Fills slots of a pool: of buffers [S, …], each a tensor of its own, one place per slot in each."""

    def __init__(self, buffers: Sequence[torch.Tensor], max_image: int) -> None:
        """`max_image`: elements of the largest image."""
        self._buffers = tuple(buffers)
        [self.dtype] = {buffer.dtype for buffer in buffers}
        self._layouts: OrderedDict[int, _Layout] = OrderedDict()  # by id of their regions; the last used is last
        # Where an image arrives. Copies of one stream run in order: the next one comes when the last is in its slot.
        self._arrival = torch.empty(max_image, dtype=self.dtype, device=buffers[0].device)

    def fill(self, slot: int, image: SlotImage) -> None:
        """Make the slot the image's adapter's, as far as kernels read it: up to the rank."""
        key = id(image.regions)
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.popitem(last=False)
            self._layouts[key] = _Layout(self._buffers, image.regions, self._arrival)
        self._layouts.move_to_end(key)
        self._arrival[: len(image.data)].copy_(image.data, non_blocking=True)
        self._layouts[key].fill(slot)


class _Layout:
    """The views through which images with the same regions get from where they arrive into slots."""

    def __init__(self, buffers: Sequence[torch.Tensor], regions: tuple[Region, ...], arrival: torch.Tensor) -> None:
        self.regions = regions  # kept, or another object could get its id
        self._buffers = buffers
        written = {region.buffer for region in regions}
        self._unwritten = [buffer for number, buffer in enumerate(buffers) if number not in written]
        # One strided tensor makes a grouped copy one copy per tensor: B's columns up to a rank below the largest are.
        self._groups = [
            (group, [torch.as_strided(arrival, r.shape, (r.source_step, 1), r.source) for r in group])
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
    """True where the region is one piece of memory on both sides."""
    rows, columns = region.shape
    return rows == 1 or region.source_step == region.target_step == columns
