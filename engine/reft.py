"""ReFT inside an engine: h + B^T (A h + b) on the residual stream after a layer, for many adapters in one batch.

Shapes: T tokens, d hidden size, r the largest rank that the engine takes, S slots. The scale is folded into B.
Every tensor-parallel rank holds whole factors: the residual stream after a layer is whole on each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from adapters.serving import REFT_PREFIX
from engine.positions import Segment


@dataclass(frozen=True, slots=True)
class ReftFactors:
    """One adapter's change of one layer, in the engine's dtype."""

    a: torch.Tensor  # [rank, d]
    b: torch.Tensor  # [rank, d]
    bias: torch.Tensor  # [rank]


@dataclass(frozen=True, slots=True)
class ReftSpan:
    """Tokens [begin, end) of a batch, under the adapter in a slot."""

    slot: int
    begin: int
    end: int


class ReftPool:
    """The factors of the adapters that are in slots. SGLang's memory pool owns the slots; this one follows it."""

    def __init__(self, num_slots: int, num_layers: int, max_rank: int, hidden: int, dtype, device) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(num_layers, num_slots, *shape, dtype=dtype, device=device)

        self.a = zeros(max_rank, hidden)  # [layers, S, r, d]
        self.b = zeros(max_rank, hidden)  # [layers, S, r, d]
        self.bias = zeros(max_rank)  # [layers, S, r]
        self.spans: list[ReftSpan] = []  # of the batch that runs
        self._ranks = [[0] * num_slots for _ in range(num_layers)]  # 0: nothing to do there

    def fill(self, slot: int, factors: Mapping[int, ReftFactors]) -> None:
        """Put an adapter's factors, by layer, into a slot; layers without any are cleared."""
        for layer, ranks in enumerate(self._ranks):
            ranks[slot] = 0
            if layer not in factors:
                continue
            new = factors[layer]
            rank = new.a.shape[0]
            for buffer, tensor in ((self.a, new.a), (self.b, new.b), (self.bias, new.bias)):
                buffer[layer, slot, :rank].copy_(tensor, non_blocking=True)
            ranks[slot] = rank

    def apply(self, layer: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Add each span's change to `hidden` [T, d] in place. The residual stream is `hidden + residual`."""
        ranks = self._ranks[layer]
        for span in self.spans:
            rank = ranks[span.slot]
            if rank == 0:
                continue
            own = hidden[span.begin : span.end]
            stream = own if residual is None else own + residual[span.begin : span.end]
            read = torch.addmm(self.bias[layer, span.slot, :rank], stream, self.a[layer, span.slot, :rank].T)
            own.addmm_(read, self.b[layer, span.slot, :rank])


def spans_of(segments: tuple[Segment, ...], slot_of: Mapping[str, int], with_reft) -> list[ReftSpan]:
    """Where a batch's ReFT adapters act. `with_reft(adapter)` says whether an adapter has any."""
    spans, begin = [], 0
    for segment in segments:
        end = begin + segment.num_tokens
        if segment.adapter is not None and with_reft(segment.adapter):
            spans.append(ReftSpan(slot_of[segment.adapter], begin, end))
        begin = end
    return spans


def factors_of(tensors: Mapping[str, torch.Tensor]) -> dict[int, ReftFactors]:
    """The factors in an adapter's tensors, by layer. Raises ValueError for a name or a set that is not one of ours."""
    parts: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        number, part = name.removeprefix(REFT_PREFIX).split(".")
        parts.setdefault(int(number), {})[part] = tensor
    for layer, found in parts.items():
        if set(found) != {"a", "b", "bias"}:
            raise ValueError(f"layer {layer} has the ReFT tensors {', '.join(sorted(found))}, not a, b and bias")
    return {layer: ReftFactors(**found) for layer, found in parts.items()}
