"""LoRA on experts on CPUs, against merged weights; `tests/engine/test_experts.py` has SGLang's bits for base tokens."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from engine.adapter_slots.experts import AdaptedTokens, ExpertBuffers, run_experts

SLOTS, EXPERTS, PER_TOKEN, TOKENS = 3, 5, 2, 40
HIDDEN, INTERMEDIATE, RANK = 12, 7, 4


class Mixture:
    """Random weights, buffers and routes."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.x = random(TOKENS, HIDDEN)
        self.w13, self.w2 = random(EXPERTS, 2 * INTERMEDIATE, HIDDEN), random(EXPERTS, HIDDEN, INTERMEDIATE)
        self.buffers = ExpertBuffers(
            random(SLOTS, EXPERTS, 2 * RANK, HIDDEN),
            random(SLOTS, EXPERTS, 2 * INTERMEDIATE, RANK),
            random(SLOTS, EXPERTS, RANK, INTERMEDIATE),
            random(SLOTS, EXPERTS, HIDDEN, RANK),
        )
        scores = torch.rand(TOKENS, EXPERTS - 1, generator=generator)  # the last expert is never chosen
        shares, self.chosen = scores.topk(PER_TOKEN, dim=1)
        self.shares = shares / shares.sum(dim=1, keepdim=True)

    def run(self, slot_of: torch.Tensor) -> torch.Tensor:
        return run_experts(self.x, self.chosen, self.shares, self.w13, self.w2, self.buffers, slot_of)

    def merged(self, token: int, slot: int) -> torch.Tensor:
        """One token's output with the adapter merged into the weights; slot -1: the base model's."""
        result = torch.zeros(HIDDEN, dtype=self.x.dtype)
        for expert, share in zip(self.chosen[token].tolist(), self.shares[token].tolist(), strict=True):
            gate, up = self.w13[expert].chunk(2)
            down = self.w2[expert]
            if slot >= 0:
                a, b = self.buffers.gate_up_a[slot, expert], self.buffers.gate_up_b[slot, expert]
                gate = gate + b[:INTERMEDIATE] @ a[:RANK]
                up = up + b[INTERMEDIATE:] @ a[RANK:]
                down = down + self.buffers.down_b[slot, expert] @ self.buffers.down_a[slot, expert]
            result += share * linear(silu(gate @ self.x[token]) * (up @ self.x[token]), down)
        return result


def slots_of_tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(-1, SLOTS, (TOKENS,), generator=torch.Generator().manual_seed(seed))


def test_every_token_gets_its_own_adapter():
    mixture, slot_of = Mixture(), slots_of_tokens()
    assert set(slot_of.tolist()) == {-1, 0, 1, 2}
    wanted = torch.stack([mixture.merged(token, slot) for token, slot in enumerate(slot_of.tolist())])
    torch.testing.assert_close(mixture.run(slot_of), wanted, rtol=1e-5, atol=1e-4)  # sums are float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_base_tokens_have_the_same_bits_beside_adapted_ones(dtype):
    mixture, slot_of = Mixture(dtype), slots_of_tokens()
    base, mixed = mixture.run(torch.full((TOKENS,), -1)), mixture.run(slot_of)
    assert mixed.dtype == dtype
    assert torch.equal(mixed[slot_of < 0], base[slot_of < 0])
    assert not torch.isclose(mixed[slot_of >= 0], base[slot_of >= 0], rtol=0.01).all(dim=1).any()


def test_segments_become_tokens():
    tokens = AdaptedTokens()
    tokens.begin_batch([2, -1, 0], [1, 2, 3])
    assert tokens.slot_of is not None
    assert tokens.slot_of.tolist() == [2, -1, -1, 0, 0, 0]
    tokens.end_batch()
    assert tokens.slot_of is None
    tokens.begin_batch([-1, -1], [4, 2])
    assert tokens.slot_of is None  # the base path is SGLang's own
