"""Grouped products against a loop over tokens."""

import random

import pytest
import torch
import torch.nn.functional as F

from training.slot_products import SlotTokens, add_low_rank, low_rank
from training.trainable.factors import ServedFactors
from training.tree.documents import Branch, Document
from training.tree.rows import Row

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}


def make_factors(ranks: list[int], size_in: int, size_out: int, dtype: torch.dtype, bias: bool) -> list[ServedFactors]:
    torch.manual_seed(sum(ranks))
    return [
        ServedFactors(
            (torch.randn(rank, size_in) / size_in**0.5).to(dtype).requires_grad_(),
            torch.randn(rank, size_out).to(dtype).requires_grad_(),
            torch.randn(rank).to(dtype).requires_grad_() if bias else None,
        )
        for rank in ranks
    ]


def leaves(factors: list[ServedFactors]) -> list[torch.Tensor]:
    return [tensor for each in factors for tensor in each if tensor is not None]


def token_by_token(x: torch.Tensor, factors: list[ServedFactors], counts: list[int]) -> torch.Tensor:
    of_tokens = [each for each, count in zip(factors, counts, strict=True) for _ in range(count)]
    return torch.stack(
        [
            each.b.T @ (each.a @ token + (0 if each.bias is None else each.bias))
            for token, each in zip(x, of_tokens, strict=True)
        ]
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("ranks", "counts", "sizes"),
    [
        ([4], [7], (16, 24)),
        ([1, 8, 3], [5, 1, 12], (16, 24)),
        ([2, 16], [3, 4], (24, 8)),
        ([3, 5], [2, 6], (10, 7)),  # sizes that grouped products cannot read
    ],
)
def test_products_by_slot(ranks: list[int], counts: list[int], sizes: tuple[int, int], dtype, bias: bool):
    factors = make_factors(ranks, *sizes, dtype, bias)
    x = torch.randn(sum(counts), sizes[0]).to(dtype).requires_grad_()
    weights = torch.randn(sum(counts), sizes[1]).to(dtype)
    gradients = []
    for compute in (low_rank, token_by_token):
        found = compute(x, factors, counts)
        gradients.append([found, *torch.autograd.grad((found * weights).sum(), [x, *leaves(factors)])])
    for one, other in zip(*gradients, strict=True):
        scale = max(1.0, float(other.detach().abs().max()))
        assert (one - other).abs().max() <= TOLERANCES[dtype] * scale


def test_several_slots_are_one_grouped_product(monkeypatch: pytest.MonkeyPatch):
    calls = []
    original = F.grouped_mm

    def counted(*arguments, **options):
        calls.append(arguments[1].shape)
        return original(*arguments, **options)

    monkeypatch.setattr(F, "grouped_mm", counted)
    low_rank(torch.randn(9, 16), make_factors([3, 5, 9], 16, 24, torch.float32, False), [2, 3, 4])
    assert calls == [(3, 16, 16), (3, 16, 24)]  # [slots, in, rank], [slots, rank, out]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("present", [(0, 3, 4), (4,)], ids=["several slots", "one slot"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_get_the_change_of_their_slot(seed: int, present: tuple[int, ...], bias: bool):
    generator = random.Random(seed)
    documents = [
        Document((1,) * generator.randint(1, 9), (Branch(1, (2,) * 3),), slot, generator.choice(("prefill", "all")))
        for slot in (2, 0, 4, 2, 0)
    ]
    row = Row.of(documents)
    tokens = SlotTokens.of(row)
    assert tokens.present((0, 1, 2, 3, 4, 5)) == (0, 2, 4)
    have = tokens.present(present)  # slot 2 has an adapter that leaves this projection alone
    factors = dict(zip(have, make_factors([2, 3][: len(have)], 16, 8, torch.float64, bias), strict=True))
    stream, to = torch.randn(1, row.num_tokens, 16, dtype=torch.float64), torch.randn(1, row.num_tokens, 8).double()
    found = add_low_rank(stream, to, tokens, factors)
    assert found.shape == to.shape
    for place, slot in enumerate(row.slots.tolist()):
        expected = to[0, place]
        if slot in factors:
            own = factors[slot]
            expected = expected + own.b.T @ (own.a @ stream[0, place] + (0 if own.bias is None else own.bias))
            assert (found[0, place] - expected).abs().max() < 1e-12
        else:
            assert torch.equal(found[0, place], expected)
