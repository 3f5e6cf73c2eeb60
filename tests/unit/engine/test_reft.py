"""ReFT for many adapters in one batch, against the formula, adapter by adapter."""

from __future__ import annotations

import pytest
import torch

from adapters.serving import REFT_PREFIX
from engine.positions import Segment
from engine.reft import ReftPool, ReftSpan, factors_of, spans_of

HIDDEN, LAYERS, SLOTS, MAX_RANK = 16, 3, 4, 8


def tensors(seed: int, rank: int, layers=range(LAYERS)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (rank, HIDDEN), "b": (rank, HIDDEN), "bias": (rank,)}
    return {
        f"{REFT_PREFIX}{layer}.{part}": torch.randn(shape, generator=generator)
        for layer in layers
        for part, shape in shapes.items()
    }


@pytest.fixture
def pool() -> ReftPool:
    return ReftPool(SLOTS, LAYERS, MAX_RANK, HIDDEN, torch.float32, "cpu")


def test_each_span_has_its_own_adapter(pool: ReftPool):
    adapters = {0: tensors(0, 1), 2: tensors(2, 8), 3: tensors(3, 5, layers=[1])}
    for slot, own in adapters.items():
        pool.fill(slot, factors_of(own))
    pool.spans = [ReftSpan(2, 0, 3), ReftSpan(0, 5, 6), ReftSpan(3, 6, 10), ReftSpan(1, 10, 12)]
    slot_of_token = [2, 2, 2, None, None, 0, 3, 3, 3, 3, 1, 1]
    for layer in range(LAYERS):
        hidden, residual = torch.randn(12, HIDDEN), torch.randn(12, HIDDEN)
        expected = hidden.clone()
        for token, slot in enumerate(slot_of_token):
            own = adapters.get(slot, {})
            if f"{REFT_PREFIX}{layer}.a" in own:
                a, b, bias = (own[f"{REFT_PREFIX}{layer}.{part}"] for part in ("a", "b", "bias"))
                expected[token] += b.T @ (a @ (hidden[token] + residual[token]) + bias)
        untouched = residual.clone()
        pool.apply(layer, hidden, residual)
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(residual, untouched)


def test_the_next_adapter_in_a_slot_inherits_nothing(pool: ReftPool):
    pool.fill(1, factors_of(tensors(0, 8)))
    pool.fill(1, factors_of(tensors(1, 2, layers=[0])))
    pool.spans = [ReftSpan(1, 0, 2)]
    hidden = torch.randn(2, HIDDEN)
    before = hidden.clone()
    pool.apply(1, hidden, None)
    assert torch.equal(hidden, before)  # the new one has nothing on layer 1
    own = tensors(1, 2, layers=[0])
    pool.apply(0, hidden, None)
    a, b, bias = (own[f"{REFT_PREFIX}0.{part}"] for part in ("a", "b", "bias"))
    torch.testing.assert_close(hidden, before + (before @ a.T + bias) @ b, rtol=1e-4, atol=1e-4)
    pool.fill(1, {})
    after = hidden.clone()
    pool.apply(0, hidden, None)
    assert torch.equal(hidden, after)


def test_spans_follow_segments_and_slots():
    segments = (Segment("a", 3), Segment(None, 2), Segment("lora", 4), Segment("b", 1))
    spans = spans_of(segments, {"a": 2, "b": 0, "lora": 1}, lambda adapter: adapter != "lora")
    assert spans == [ReftSpan(2, 0, 3), ReftSpan(0, 9, 10)]


def test_a_set_that_is_not_whole_is_refused():
    broken = tensors(0, 2)
    del broken[f"{REFT_PREFIX}1.bias"]
    with pytest.raises(ValueError, match="layer 1 has the ReFT tensors a, b"):
        factors_of(broken)
