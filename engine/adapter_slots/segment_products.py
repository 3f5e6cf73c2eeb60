"""LoRA's two products on CPUs, segment by segment: one call for neighbours of the same length. Replaces SGLang's.

Shapes: T tokens in segments of one slot each; A is [S, n R, K] per slot and B [S, d, R], for n slices (q, k and v; gate
and up; or one) and the largest rank R. The first n r rows of A, and columns of its product, are those of an adapter of
rank r. Rows of tokens whose slot has rank 0 are left as they are, or zero.

SGLang calls for each segment and slice, with numbers that it reads out of tensors each time: sixteen short prompts
under as many adapters take seven times as long as one of their length.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring segments of one length and one rank."""

    begin: int  # the first token
    length: int  # of each segment
    slots: tuple[int, ...]
    rank: int

    @property
    def tokens(self) -> slice:
        return slice(self.begin, self.begin + self.length * len(self.slots))


def runs(slots: list[int], lengths: list[int], ranks: list[int]) -> Iterator[Run]:
    """The segments whose slots have a rank, in runs. `ranks`: of every slot."""
    begin, found = 0, None
    for slot, length in zip(slots, lengths, strict=False):
        if not length:
            continue
        rank = ranks[slot]
        if found is not None and (found.length, found.rank) == (length, rank):
            found = Run(found.begin, length, (*found.slots, slot), rank)
        else:
            if found is not None:
                yield found
            found = Run(begin, length, (slot,), rank) if rank else None
        begin += length
    if found is not None:
        yield found


def shrink(
    x: torch.Tensor,
    weights: torch.Tensor,
    weight_indices: torch.Tensor,
    seg_lens: torch.Tensor,
    lora_ranks: torch.Tensor,
    num_slices: int = 1,
) -> torch.Tensor:
    """A x, [T, n R]; zero in columns beyond a rank. x [T, K]. Packed adapters have no scaling: it is in B."""
    output = x.new_zeros(x.shape[0], weights.shape[1] if weights.numel() else 0)
    if not weights.numel():
        return output
    for run in runs(weight_indices.tolist(), seg_lens.tolist(), lora_ranks.tolist()):
        columns = num_slices * run.rank
        made = output[run.tokens, :columns]
        if len(run.slots) > 1:
            own = weights[list(run.slots), :columns].transpose(1, 2)
            made.copy_(torch.bmm(_split(x[run.tokens], run), own).flatten(0, 1))
        else:
            made.addmm_(x[run.tokens], weights[run.slots[0], :columns].T, beta=0)
    return output


def expand(
    x: torch.Tensor,
    weights: torch.Tensor,
    weight_indices: torch.Tensor,
    seg_lens: torch.Tensor,
    lora_ranks: torch.Tensor,
    slice_offsets: torch.Tensor,
    base_output: torch.Tensor | None = None,
) -> torch.Tensor:
    """B x added to `base_output` [T, d], in place; x [T, n R]. Slice i has the columns from `slice_offsets[i]` on."""
    offsets = slice_offsets.tolist()
    output = x.new_zeros(x.shape[0], offsets[-1] if offsets else 0) if base_output is None else base_output
    if not weights.numel():
        return output
    for run in runs(weight_indices.tolist(), seg_lens.tolist(), lora_ranks.tolist()):
        read, made = x[run.tokens], output[run.tokens]
        own = weights[list(run.slots), :, : run.rank] if len(run.slots) > 1 else None
        for number, (begin, end) in enumerate(itertools.pairwise(offsets)):
            part = read[:, number * run.rank : (number + 1) * run.rank]
            if own is None:
                made[:, begin:end].addmm_(part, weights[run.slots[0], begin:end, : run.rank].T)
            else:
                _split(made, run)[:, :, begin:end].baddbmm_(_split(part, run), own[:, begin:end].transpose(1, 2))
    return output


def _split(rows: torch.Tensor, run: Run) -> torch.Tensor:
    """The rows of a run as [segments, length, columns], the same memory."""
    return rows.unflatten(0, (len(run.slots), run.length))
