"""Fills an adapter's slot from one image.

SGLang fills a slot tensor by tensor: hundreds of small steps in Python that look up names, slice and page-lock memory.
That takes 10 ms and more each time an adapter returns to a slot, and no batch runs meanwhile. A packed adapter is an
image of its slot: one transfer to the device, then grouped copies into the slot's buffers. LoRA on experts can take
gigabytes, so an image that is larger than the staging buffer is transferred in pieces.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

_MAX_LAYOUTS = 8  # cached; adapters of the same rank and modules share one


@dataclass(frozen=True, slots=True)
class Region:
    """A matrix of an image, or those of adjacent experts, and the destination in one buffer's slot, in elements."""

    buffer: int
    shape: tuple[int, ...]  # [rows, columns] or [experts, rows, columns]
    source: int  # of its first element in the image
    source_strides: tuple[int, ...]
    target: int  # of its first element in the buffer's slot
    target_strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """Behind its last element in the image."""
        return (
            self.source + 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.source_strides, strict=True))
        )


@dataclass(frozen=True, slots=True)
class SlotImage:
    """An adapter's content of a slot. Buffers without a region become zero."""

    data: torch.Tensor  # flat, in host memory
    regions: tuple[Region, ...]  # images with the same regions share one object


class SlotFiller:
    """Fills the slots of a pool of buffers, each a tensor [S, …] with one entry per slot.

    Kernels read a projection [S, rows, columns] up to the adapter's rank, and experts [S, experts, rows, columns]
    whole. So zeros are written around an adapter's experts, and nothing beyond its rank elsewhere.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], max_piece: int) -> None:
        """`max_piece`: elements of the largest piece of an image on the device, at least those of a region."""
        self._buffers = tuple(buffers)
        [self.dtype] = {buffer.dtype for buffer in buffers}
        self._layouts: OrderedDict[int, _Layout] = OrderedDict()  # by id of their regions, in LRU order
        self._whole: dict[int, list[torch.Tensor]] = {}  # views of every buffer, by slot
        # Staging buffer on the device. Copies of one stream run in order, so the next image may overwrite it.
        self._staging = torch.empty(max_piece, dtype=self.dtype, device=buffers[0].device)

    def fill(self, slot: int, image: SlotImage) -> None:
        """Copy an image into a slot."""
        key = id(image.regions)
        if key not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.popitem(last=False)
            self._layouts[key] = _Layout(self._buffers, image.regions, self._staging)
        self._layouts.move_to_end(key)
        self._layouts[key].fill(slot, image.data)

    def clear(self, slot: int) -> None:
        """Zero every buffer of a slot."""
        if slot not in self._whole:
            self._whole[slot] = [buffer[slot] for buffer in self._buffers]
        torch._foreach_zero_(self._whole[slot])


class _Layout:
    """Views of the staging buffer and of slots, shared by images with the same regions."""

    def __init__(self, buffers: Sequence[torch.Tensor], regions: tuple[Region, ...], staging: torch.Tensor) -> None:
        self.regions = regions  # keeps the object alive: its id is the cache key
        self._buffers, self._staging = buffers, staging
        self._pieces = [_Piece.of(piece, staging) for piece in _cut(regions, len(staging))]
        self._zeroed = _to_zero(buffers, regions)
        self._targets: dict[int, list[list[list[torch.Tensor]]]] = {}  # by slot, of each piece one list per group

    def fill(self, slot: int, data: torch.Tensor) -> None:
        if self._zeroed:
            torch._foreach_zero_([buffer[slot] for buffer in self._zeroed])
        for piece, targets_of_groups in zip(self._pieces, self._targets_in(slot), strict=True):
            own = data[piece.span.start : piece.span.stop]
            self._staging[: len(own)].copy_(own, non_blocking=True)
            for targets, sources in zip(targets_of_groups, piece.sources, strict=True):
                torch._foreach_copy_(targets, sources)

    def _targets_in(self, slot: int) -> list[list[list[torch.Tensor]]]:
        if slot not in self._targets:
            self._targets[slot] = [
                [[self._target(region, slot) for region in group] for group in piece.groups] for piece in self._pieces
            ]
        return self._targets[slot]

    def _target(self, region: Region, slot: int) -> torch.Tensor:
        buffer = self._buffers[region.buffer]
        offset = slot * buffer.stride(0) + region.target
        return torch.as_strided(buffer, region.shape, region.target_strides, offset)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is transferred at once."""

    span: range  # of the image
    groups: tuple[tuple[Region, ...], ...]
    sources: tuple[list[torch.Tensor], ...]  # of each group, in the staging buffer

    @classmethod
    def of(cls, regions: Sequence[Region], staging: torch.Tensor) -> Self:
        begin = regions[0].source
        # One strided tensor degrades a grouped copy to one copy per tensor. B is strided below the largest rank.
        groups = tuple(
            group
            for is_dense in (True, False)
            if (group := tuple(region for region in regions if _is_dense(region) == is_dense))
        )
        return cls(
            range(begin, max(region.end for region in regions)),
            groups,
            tuple(
                [torch.as_strided(staging, r.shape, r.source_strides, r.source - begin) for r in group]
                for group in groups
            ),
        )


def _cut(regions: Sequence[Region], max_piece: int) -> list[list[Region]]:
    """Cut an image between regions, into as few pieces as fit."""
    pieces: list[list[Region]] = []
    begin = end = 0  # of the last piece
    for region in sorted(regions, key=lambda each: each.source):
        end = max(end, region.end)
        if not pieces or end - begin > max_piece:
            pieces.append([])
            begin, end = region.source, region.end
        pieces[-1].append(region)
    return pieces


def _to_zero(buffers: Sequence[torch.Tensor], regions: Sequence[Region]) -> list[torch.Tensor]:
    """The buffers in which kernels would read what an earlier adapter left."""
    num_written = [0] * len(buffers)
    for region in regions:
        num_written[region.buffer] += math.prod(region.shape)
    return [
        buffer
        for buffer, count in zip(buffers, num_written, strict=True)
        if count == 0 or (_is_of_experts(buffer) and count < buffer[0].numel())
    ]


def _is_of_experts(buffer: torch.Tensor) -> bool:
    return buffer.dim() == 4


def _is_dense(region: Region) -> bool:
    """Whether the region is contiguous in the image and in the buffer."""
    dense = 1
    for size, *strides in zip(
        *map(reversed, (region.shape, region.source_strides, region.target_strides)), strict=True
    ):
        if size > 1 and strides != [dense, dense]:
            return False
        dense *= size
    return True
