"""Apply adapters to the tokens of one row.

One slot: a product over all tokens, zero where a token has no adapter, added by the product itself. Gathering would
move more memory than it saves arithmetic. Several slots: tokens gathered by slot, one grouped product for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.nn.functional as F

from training.trainable.factors import ServedFactors
from training.tree.rows import Row

# What torch's grouped_mm reads: rows whose length is a multiple of 16 bytes, of these dtypes.
_ALIGNED = 8
_GROUPED_DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16,)}


@dataclass(frozen=True, slots=True, eq=False)
class SlotTokens:
    """Where the tokens of each slot are in a row."""

    places: torch.Tensor  # [num_adapted], by slot
    counts: tuple[int, ...]  # of each slot
    _chosen: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    _others: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row) -> Self:
        return cls(row.adapted, row.num_adapted)

    def present(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Those of `slots` (ascending) that any token has."""
        return tuple(slot for slot in slots if slot < len(self.counts) and self.counts[slot])

    def places_of(self, slots: tuple[int, ...]) -> torch.Tensor:
        """The places of the tokens of these slots, by slot."""
        if slots not in self._chosen:
            parts = self.places.split(self.counts)
            self._chosen[slots] = torch.cat([parts[slot] for slot in slots])
        return self._chosen[slots]

    def others(self, slot: int, num_tokens: int) -> torch.Tensor:
        """[num_tokens, 1] bool: tokens that do not have this slot."""
        if slot not in self._others:
            others = torch.ones(num_tokens, 1, dtype=torch.bool, device=self.places.device)
            self._others[slot] = others.index_fill_(0, self.places_of((slot,)), False)
        return self._others[slot]


def add_low_rank(
    stream: torch.Tensor, to: torch.Tensor, tokens: SlotTokens, factors: dict[int, ServedFactors]
) -> torch.Tensor:
    """`to` with B^T (A x + b) of each token's slot added, x from `stream`; nothing is added to other tokens.

    `stream` [..., in] and `to` [..., out] have the row's tokens in order; `factors`: of each slot that is present.
    """
    slots = tuple(sorted(factors))
    if len(slots) == 1:
        return _add_of_one(stream, to, tokens, slots[0], factors[slots[0]])
    places = tokens.places_of(slots)
    chosen = stream.reshape(-1, stream.shape[-1]).index_select(0, places)
    delta = low_rank(chosen, [factors[slot] for slot in slots], [tokens.counts[slot] for slot in slots])
    return to.reshape(-1, to.shape[-1]).index_add(0, places, delta).view(to.shape)


def _add_of_one(
    stream: torch.Tensor, to: torch.Tensor, tokens: SlotTokens, slot: int, factors: ServedFactors
) -> torch.Tensor:
    inner = _inner(stream.reshape(-1, stream.shape[-1]), factors)
    inner = inner.masked_fill(tokens.others(slot, inner.shape[0]), 0.0)
    return torch.addmm(to.reshape(-1, to.shape[-1]), inner, factors.b).view(to.shape)


def low_rank(x: torch.Tensor, groups: Sequence[ServedFactors], counts: Sequence[int]) -> torch.Tensor:
    """B^T (A x + b) [num_tokens, out] of x [num_tokens, in], whose first counts[0] tokens have groups[0], and so on."""
    sizes = (groups[0].a.shape[1], groups[0].b.shape[1])
    is_readable = x.dtype in _GROUPED_DTYPES.get(x.device.type, ()) and not any(size % _ALIGNED for size in sizes)
    if len(groups) > 1 and is_readable:
        return _grouped(x, groups, counts)
    return torch.cat([_product(part, each) for part, each in zip(x.split(list(counts)), groups, strict=True)])


def _product(x: torch.Tensor, factors: ServedFactors) -> torch.Tensor:
    return _inner(x, factors) @ factors.b


def _inner(x: torch.Tensor, factors: ServedFactors) -> torch.Tensor:
    """A x + b [num_tokens, r]"""
    inner = x @ factors.a.T
    return inner if factors.bias is None else inner + factors.bias


def _grouped(x: torch.Tensor, groups: Sequence[ServedFactors], counts: Sequence[int]) -> torch.Tensor:
    rank = max(each.a.shape[0] for each in groups)
    rank += -rank % _ALIGNED
    a = torch.stack([_padded(each.a, rank) for each in groups])  # [groups, rank, in]
    b = torch.stack([_padded(each.b, rank) for each in groups])  # [groups, rank, out]
    ends = torch.tensor(counts, device=x.device).cumsum(0).to(torch.int32)
    inner = F.grouped_mm(x, a.transpose(1, 2), offs=ends)
    if groups[0].bias is not None:
        biases = torch.stack([_padded(each.bias, rank) for each in groups if each.bias is not None])
        inner = inner + biases.repeat_interleave(torch.tensor(counts, device=x.device), dim=0, output_size=len(x))
    return F.grouped_mm(inner, b, offs=ends)


def _padded(factor: torch.Tensor, rank: int) -> torch.Tensor:
    """With rows of zeros up to the rank."""
    missing = rank - factor.shape[0]
    return F.pad(factor, (0, 0) * (factor.ndim - 1) + (0, missing)) if missing else factor
