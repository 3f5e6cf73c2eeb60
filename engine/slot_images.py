"""Filling an adapter's slot at once.

SGLang fills a slot tensor by tensor, hundreds of small steps in Python for each of which it looks up names, slices and
page-locks memory: ten milliseconds and more, each time an adapter returns to a slot, while no batch runs. What those
steps put where is the same each time. So the first time it is recorded, as one flat image in host memory and a list of
regions; from then on it is one transfer to the device and one fused copy into the slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 64  # elements: fused copies want 16 bytes at least
_MOST_LAYOUTS = 8  # whose views are kept: adapters of the same rank and modules share one


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

    flat: torch.Tensor  # page-locked where a GPU reads it
    regions: tuple[Region, ...]


class SlotFiller:
    """Records and fills slots of a pool: of buffers [S, …], each a tensor of its own, one place per slot in each."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = tuple(buffers)
        self._number_of = {buffer.untyped_storage().data_ptr(): n for n, buffer in enumerate(self._buffers)}
        self._layouts: dict[tuple[Region, ...], _Layout] = {}

    def image_of(self, slot: int, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> SlotImage | None:
        """The image of a slot that these copies have filled: (view of a buffer, what was copied there).

        None where they are not all into the slot, or not of the buffers' dtype: such an adapter has no image.
        """
        regions, parts, start = [], [], 0
        for view, weight in copies:
            number = self._number_of.get(view.untyped_storage().data_ptr())
            if number is None:
                return None
            buffer = self._buffers[number]
            offset = view.storage_offset() - slot * buffer.stride(0)
            if weight.dtype != buffer.dtype or not 0 <= offset < buffer.stride(0) or view.numel() == 0:
                return None
            regions.append(Region(number, tuple(view.shape), view.stride(), offset, start))
            parts.append((start, weight))
            start += -(-weight.numel() // _ALIGNMENT) * _ALIGNMENT
        if any(buffer.dtype != self._buffers[0].dtype for buffer in self._buffers):
            return None
        flat = torch.zeros(start, dtype=self._buffers[0].dtype, pin_memory=self._buffers[0].is_cuda)
        for begin, weight in parts:
            flat[begin : begin + weight.numel()].copy_(weight.reshape(-1))
        return SlotImage(flat, tuple(regions))

    def fill(self, slot: int, image: SlotImage) -> None:
        """Make the slot what it was when the image was recorded."""
        layout = self._layouts.get(image.regions)
        if layout is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[image.regions] = _Layout(self._buffers, image)
        layout.fill(slot, image.flat)


class _Layout:
    """The views that images with the same regions are copied through."""

    def __init__(self, buffers: Sequence[torch.Tensor], image: SlotImage) -> None:
        self._buffers = buffers
        self._regions = image.regions
        written = {region.buffer for region in image.regions}
        self._unwritten = [buffer for number, buffer in enumerate(buffers) if number not in written]
        # Copies of one stream run in order: the next image arrives here when the last one is in its slot.
        self._arrival = torch.empty_like(image.flat, device=buffers[0].device)
        self._sources = [
            self._arrival[region.start : region.start + _numel(region.shape)].view(region.shape)
            for region in image.regions
        ]
        self._targets: dict[int, list[torch.Tensor]] = {}  # by slot

    def fill(self, slot: int, flat: torch.Tensor) -> None:
        if self._sources:
            self._arrival.copy_(flat, non_blocking=True)
            torch._foreach_copy_(self._targets_in(slot), self._sources)
        if self._unwritten:
            torch._foreach_zero_([buffer[slot] for buffer in self._unwritten])

    def _targets_in(self, slot: int) -> list[torch.Tensor]:
        if slot not in self._targets:
            self._targets[slot] = [
                torch.as_strided(
                    self._buffers[region.buffer],
                    region.shape,
                    region.stride,
                    slot * self._buffers[region.buffer].stride(0) + region.offset,
                )
                for region in self._regions
            ]
        return self._targets[slot]


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
