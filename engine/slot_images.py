"""Filling an adapter's slot at once.

SGLang fills a slot tensor by tensor, hundreds of small steps in Python for each of which it looks up names, slices and
page-locks memory: ten milliseconds and more, each time an adapter returns to a slot, while no batch runs. What those
steps put where is the same each time. So the first time it is recorded, as one flat image in host memory and a list of
regions; from then on it is one transfer to the device and, there, grouped copies into the slot.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 64  # elements: grouped copies want 16 bytes at least
_SMALLEST_BLOCK = 1 << 20  # bytes
_MOST_LAYOUTS = 8  # whose views into slots are kept: adapters of the same rank and modules share one


@dataclass(frozen=True, slots=True)
class Region:
    """What one step wrote: part of one buffer's slot."""

    buffer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements from the slot's first
    start: int  # in the image


@dataclass(frozen=True, slots=True)
class SlotImage:
    """All that an adapter has in a slot. Buffers without a region are zero."""

    blocks: tuple[torch.Tensor, ...]  # the flat image in pieces, page-locked where a GPU reads them
    regions: tuple[Region, ...]  # one object for all images that have the same


class SlotFiller:
    """Records and fills slots of a pool: of buffers [S, …], each a tensor of its own, one place per slot in each."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = tuple(buffers)
        [self._dtype] = {buffer.dtype for buffer in buffers}
        self._number_of = {buffer.untyped_storage().data_ptr(): n for n, buffer in enumerate(self._buffers)}
        self._regions: dict[tuple[Region, ...], tuple[Region, ...]] = {}
        self._layouts: OrderedDict[int, _Layout] = OrderedDict()  # by id of their regions; the last used is last
        # Where an image arrives. Copies of one stream run in order: the next one comes when the last is in its slot.
        largest = sum(_aligned(buffer[0].numel()) for buffer in buffers)
        self._arrival = torch.empty(largest, dtype=self._dtype, device=buffers[0].device)

    def image_of(self, slot: int, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> SlotImage | None:
        """The image of a slot that these copies have filled: (view of a buffer, what was copied there).

        None where they are not all into the slot, or not of the buffers' dtype: such an adapter has no image.
        """
        found, weights, start = [], [], 0
        for view, weight in copies:
            number = self._number_of.get(view.untyped_storage().data_ptr())
            if number is None:
                return None
            stride = self._buffers[number].stride(0)
            offset = view.storage_offset() - slot * stride
            if weight.dtype != self._dtype or weight.shape != view.shape or not 0 <= offset < stride:
                return None
            found.append(Region(number, tuple(view.shape), view.stride(), offset, start))
            weights.append(weight)
            start += _aligned(weight.numel())
        if start > len(self._arrival):
            return None
        regions = self._regions.setdefault(tuple(found), tuple(found))
        flat = torch.zeros(start, dtype=self._dtype)
        for region, weight in zip(regions, weights, strict=True):
            flat[region.start : region.start + weight.numel()].copy_(weight.reshape(-1))
        return SlotImage(_in_blocks(flat, is_page_locked=self._arrival.is_cuda), regions)

    def fill(self, slot: int, image: SlotImage) -> None:
        """Make the slot what it was when the image was recorded, as far as kernels read it: up to the rank."""
        key = id(image.regions)
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.popitem(last=False)
            self._layouts[key] = _Layout(self._buffers, image.regions, self._arrival)
        self._layouts.move_to_end(key)
        begin = 0
        for block in image.blocks:
            self._arrival[begin : begin + len(block)].copy_(block, non_blocking=True)
            begin += len(block)
        self._layouts[key].fill(slot)


class _Layout:
    """The views through which images with the same regions get from where they arrive into slots."""

    def __init__(self, buffers: Sequence[torch.Tensor], regions: tuple[Region, ...], arrival: torch.Tensor) -> None:
        self._buffers = buffers
        written = {region.buffer for region in regions}
        self._unwritten = [buffer for number, buffer in enumerate(buffers) if number not in written]
        # One strided tensor makes a grouped copy one copy per tensor: B's columns up to a rank below the largest are.
        self._groups = [
            (group, [arrival[r.start : r.start + math.prod(r.shape)].view(r.shape) for r in group])
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
        return torch.as_strided(buffer, region.shape, region.stride, slot * buffer.stride(0) + region.offset)


def _in_blocks(flat: torch.Tensor, is_page_locked: bool) -> tuple[torch.Tensor, ...]:
    """In pieces of powers of two: torch rounds page-locked memory up to one, which can double an image."""
    blocks, begin = [], 0
    while begin < len(flat):
        left = (len(flat) - begin) * flat.element_size()
        num_bytes = left if left <= _SMALLEST_BLOCK else 1 << (left.bit_length() - 1)
        block = flat[begin : begin + num_bytes // flat.element_size()]
        blocks.append(block.pin_memory() if is_page_locked else block)
        begin += len(block)
    return tuple(blocks)


def _is_dense(region: Region) -> bool:
    """True where the region is one piece of memory."""
    stride = 1
    for size, step in zip(reversed(region.shape), reversed(region.stride), strict=True):
        if size > 1 and step != stride:
            return False
        stride *= size
    return True


def _aligned(num_elements: int) -> int:
    return -(-num_elements // _ALIGNMENT) * _ALIGNMENT
