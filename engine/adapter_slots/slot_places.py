"""Where the matrices of a packed file belong in an engine's slots, whole or this tensor-parallel rank's share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from adapters.errors import AdapterIncompatible
from adapters.model.base_model import BaseModel
from adapters.packed import PackedMetadata
from adapters.packed.fused_layout import EXPERT_PARTS_OF, PARTS_OF
from engine.adapter_slots.slot_images import Region


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of B and the columns of A of an engine module that belong to this tensor-parallel rank."""

    rows: tuple[range, ...]
    columns: range


class SlotPlaces:
    """The slots of one pool."""

    def __init__(
        self,
        buffers: Mapping[tuple[str, str, int], torch.Tensor],
        base: BaseModel,
        shares: Mapping[str, Share] | None,
    ) -> None:
        """As `PackedLoader`."""
        self._number_of = {key: number for number, key in enumerate(buffers)}
        self._buffers = tuple(buffers.values())
        self._base = base
        self._shares = shares
        ranks = (
            b.shape[3] for (module, factor, _), b in buffers.items() if module in EXPERT_PARTS_OF and factor == "b"
        )
        self.expert_rank = max(ranks, default=0)  # the largest that slots take; 0: none on experts

    def largest_piece(self, max_rank: int) -> int:
        """Elements of the image of all projections, or of one layer's matrices of experts if those are larger."""
        base, widths, pieces = self._base, 0, []
        for module in {module for module, _, _ in self._number_of}:
            if module in PARTS_OF:
                widths += len(PARTS_OF[module]) * base.shape_of(module)[1] + base.shape_of(module)[0]
            else:
                assert base.experts is not None
                size_in = base.expert_shape_of(EXPERT_PARTS_OF[module][0])[1]
                num_rows = sum(base.expert_shape_of(part)[0] for part in EXPERT_PARTS_OF[module])
                most = max(len(EXPERT_PARTS_OF[module]) * size_in, num_rows)
                pieces.append(base.experts.count * self.expert_rank * most)
        return max(base.num_layers * max_rank * widths, *pieces, 0)

    def regions_of(
        self, metadata: PackedMetadata, tensors: Mapping[str, torch.Tensor], places: Mapping[str, range]
    ) -> Iterator[Region]:
        for module, place in metadata.modules.items():
            for factor in "ab":
                name = f"lora.{module}.{factor}"
                _, num_rows, num_columns = tensors[name].shape
                for number, layer in enumerate(place.layers):
                    buffer = self._buffer_of(metadata, module, factor, layer)
                    begin = places[name].start + number * num_rows * num_columns
                    yield from self._placed(module, factor, buffer, begin, num_rows, num_columns)
        for module, own in metadata.experts.modules.items() if metadata.experts is not None else ():
            for factor in "ab":
                name = f"lora.{module}.{factor}"
                _, num_rows, num_columns = tensors[name].shape
                begin = places[name].start
                for layer, ranges in zip(own.layers, own.experts or (), strict=True):
                    buffer = self._buffer_of(metadata, module, factor, layer)
                    for first, last in ranges:
                        experts = range(first, last + 1)
                        yield from self._placed_experts(module, factor, buffer, begin, experts, num_rows, num_columns)
                        begin += len(experts) * num_rows * num_columns

    def _buffer_of(self, metadata: PackedMetadata, module: str, factor: str, layer: int) -> int:
        buffer = self._number_of.get((module, factor, layer))
        if buffer is None:
            raise AdapterIncompatible(
                f"revision {metadata.revision_id} adapts {module}, and the engine has no slots for it"
            )
        return buffer

    def _placed(
        self, module: str, factor: str, buffer: int, begin: int, num_rows: int, num_columns: int
    ) -> Iterator[Region]:
        """This rank's part of a matrix: one region per range of rows."""
        all_rows, columns = self._shares_of(module, factor, num_rows, num_columns)
        step, target = self._buffers[buffer].shape[2], 0
        for rows in all_rows:
            source = begin + rows.start * num_columns + columns.start
            yield Region(buffer, (len(rows), len(columns)), source, (num_columns, 1), target, (step, 1))
            target += len(rows) * step

    def _placed_experts(
        self, module: str, factor: str, buffer: int, begin: int, experts: range, num_rows: int, num_columns: int
    ) -> Iterator[Region]:
        """As `_placed`, for adjacent experts, of which a module has a gate's part and up's, or down's alone.

        Slots have up's A behind room for a gate's A of the largest rank, and up's B behind room for a gate's rows as
        SGLang pads them; packed files have either behind the gate's own.
        """
        all_rows, columns = self._shares_of(module, factor, num_rows, num_columns)
        num_parts = len(EXPERT_PARTS_OF[module])
        expert_step, step, _ = self._buffers[buffer].stride()[1:]
        room = self.expert_rank if factor == "a" else self._buffers[buffer].shape[2] // num_parts
        # SGLang's slice of a gate's rows reaches into up's where it has padded them.
        of_part = num_rows // num_parts
        [first] = _ranges([number for rows in all_rows for number in rows if number < of_part])
        for part in range(num_parts):
            rows = range(first.start + part * of_part, first.stop + part * of_part)
            yield Region(
                buffer,
                (len(experts), len(rows), len(columns)),
                begin + rows.start * num_columns + columns.start,
                (num_rows * num_columns, num_columns, 1),
                experts.start * expert_step + part * room * step,
                (expert_step, step, 1),
            )

    def _shares_of(self, module: str, factor: str, num_rows: int, num_columns: int) -> tuple[tuple[range, ...], range]:
        """The rows and the columns of a matrix that belong to this rank."""
        if self._shares is None:
            return (range(num_rows),), range(num_columns)
        if factor == "a":
            return (range(num_rows),), self._shares[module].columns
        return self._shares[module].rows, range(num_columns)


def share_of(module: Any, num_rows: int, num_columns: int) -> Share:
    """This rank's share of a module, as SGLang's wrapper slices B of `num_rows` rows and A of `num_columns` columns."""
    rows = module.slice_lora_b_weights(torch.arange(num_rows).unsqueeze(1))[:, 0].tolist()
    columns = module.slice_lora_a_weights(torch.arange(num_columns).unsqueeze(0))[0].tolist()
    [column_range] = _ranges(columns)
    return Share(tuple(_ranges(rows)), column_range)


def expert_share_of(experts: Any, module: str, tp_rank: int, num_rows: int, num_columns: int) -> Share:
    """As `share_of`, of each expert, from SGLang's wrapper of a layer's experts."""
    b, a = torch.arange(num_rows).unsqueeze(1), torch.arange(num_columns).unsqueeze(0)
    rows = experts.slice_moe_lora_b_weights(b, tp_rank, module)[:, 0].tolist()
    [columns] = _ranges(experts.slice_moe_lora_a_weights(a, tp_rank, module)[0].tolist())
    return Share(tuple(_ranges(rows)), columns)


def _ranges(numbers: Sequence[int]) -> list[range]:
    """Numbers as a list of contiguous ranges."""
    found = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        found.append(range(members[0], members[-1] + 1))
    return found
