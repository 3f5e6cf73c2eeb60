"""LoRA's products on CPUs are those of SGLang, for any segments, ranks and slices."""

import itertools

import pytest
import torch

from engine.adapter_slots.segment_products import Run, expand, runs, shrink

SLOTS, MOST, INPUTS = 6, 8, 48
RANKS = [0, 8, 3, 8, 8, 1]
CASES = {
    "one segment": ([1], [40]),
    "neighbours of one length": ([1, 3, 4, 1], [16, 16, 16, 16]),
    "other ranks between": ([1, 2, 3, 4, 5, 1], [7, 7, 7, 7, 7, 7]),
    "base tokens between": ([1, 0, 3, 0, 0, 4, 1], [9, 9, 9, 4, 1, 9, 9]),
    "other lengths": ([1, 3, 4, 1, 3], [5, 6, 6, 1, 1]),
    "empty ones": ([1, 3, 3, 4], [6, 0, 6, 6]),
    "base tokens only": ([0, 0], [3, 4]),
    "nothing": ([], []),
}


def formulas(x, a, b, slots, lengths, offsets, base):
    """Both products token by token, in float64."""
    num_slices = len(offsets) - 1
    shrunk, result = torch.zeros(x.shape[0], num_slices * MOST).double(), base.double().clone()
    tokens = list(itertools.chain.from_iterable([slot] * length for slot, length in zip(slots, lengths, strict=True)))
    for token, slot in enumerate(tokens):
        rank = RANKS[slot]
        shrunk[token, : num_slices * rank] = a[slot, : num_slices * rank].double() @ x[token].double()
        for number, (begin, end) in enumerate(itertools.pairwise(offsets)):
            part = shrunk[token, number * rank : (number + 1) * rank]
            result[token, begin:end] += b[slot, begin:end, :rank].double() @ part
    return shrunk, result


@pytest.mark.parametrize("offsets", [[0, 20], [0, 12, 20, 28]])
@pytest.mark.parametrize("case", CASES)
def test_products(case: str, offsets: list[int]):
    slots, lengths = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    num_slices, tokens = len(offsets) - 1, sum(lengths)
    x = torch.randn(tokens, INPUTS, generator=generator)
    a = torch.randn(SLOTS, num_slices * MOST, INPUTS, generator=generator)
    b = torch.randn(SLOTS, offsets[-1], MOST, generator=generator)
    base = torch.randn(tokens, offsets[-1], generator=generator)
    batch = torch.tensor(slots, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), torch.tensor(RANKS)
    wanted_shrunk, wanted = formulas(x, a, b, slots, lengths, offsets, base)
    kept = base.clone()
    shrunk = shrink(x, a, *batch, num_slices)
    torch.testing.assert_close(shrunk.double(), wanted_shrunk, atol=1e-4, rtol=1e-4)
    made = expand(shrunk, b, *batch, torch.tensor(offsets), base)
    assert made is base
    torch.testing.assert_close(made.double(), wanted, atol=1e-4, rtol=1e-4)
    for token, slot in enumerate(itertools.chain.from_iterable([s] * n for s, n in zip(slots, lengths, strict=True))):
        if not RANKS[slot]:  # the base model's tokens keep their bits
            assert torch.equal(made[token], kept[token])
    if tokens:
        torch.testing.assert_close(expand(shrunk, b, *batch, torch.tensor(offsets)), made - kept, atol=1e-4, rtol=1e-4)


def test_adapters_without_rows():
    empty = torch.zeros(SLOTS, 0, INPUTS)
    batch = torch.tensor([1]), torch.tensor([4]), torch.tensor(RANKS)
    x, base = torch.randn(4, INPUTS), torch.randn(4, 20)
    assert shrink(x, empty, *batch).shape == (4, 0)
    assert expand(x, torch.zeros(SLOTS, 0, 0), *batch, torch.tensor([0, 20]), base) is base


def test_neighbours_of_one_length_and_rank_are_one_run():
    assert list(runs([1, 3, 4, 0, 2], [4, 4, 4, 4, 4], RANKS)) == [Run(0, 4, (1, 3, 4), 8), Run(16, 4, (2,), 3)]
