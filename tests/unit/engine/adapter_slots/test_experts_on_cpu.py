"""LoRA on experts on CPUs: against merged weights, and base tokens bit by bit against SGLang's own function."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("which", ["gate_up_b", "down_b"])
def test_a_projection_of_zeros_changes_nothing(which: str):
    """As of an adapter that adapts the other one alone."""
    mixture = Mixture()
    for each in {"gate_up_b", "down_b"} - {which}:
        getattr(mixture.buffers, each).zero_()
    slot_of = slots_of_tokens()
    wanted = torch.stack([mixture.merged(token, slot) for token, slot in enumerate(slot_of.tolist())])
    torch.testing.assert_close(mixture.run(slot_of), wanted, rtol=1e-5, atol=1e-4)
    getattr(mixture.buffers, which).zero_()
    assert torch.equal(mixture.run(slot_of), mixture.run(torch.full((TOKENS,), -1)))


def test_segments_become_tokens():
    tokens = AdaptedTokens()
    tokens.begin_batch([2, -1, 0], [1, 2, 3])
    assert tokens.slot_of is not None
    assert tokens.slot_of.tolist() == [2, -1, -1, 0, 0, 0]
    tokens.end_batch()
    assert tokens.slot_of is None
    tokens.begin_batch([-1, -1], [4, 2])
    assert tokens.slot_of is None  # the base path is SGLang's own


# In a process of its own: SGLang's imports change much.
_CODE = """
import json
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
import torch
from sglang.srt.layers import activation
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
from test_experts_on_cpu import TOKENS, Mixture, slots_of_tokens

activation.get_exec = lambda: SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=None))

def theirs(mixture):
    layer = SimpleNamespace(num_experts=len(mixture.w13), w13_weight=mixture.w13, w2_weight=mixture.w2)
    config = SimpleNamespace(apply_router_weight_on_input=False, activation="silu", gemm1_alpha=None)
    routes = mixture.shares, mixture.chosen.int(), None
    return moe_forward_native(layer, mixture.x, routes, config)

found = []
for dtype in (torch.float32, torch.bfloat16):
    for seed in range(5):
        mixture, slot_of = Mixture(dtype, seed), slots_of_tokens(seed)
        wanted, made = theirs(mixture), mixture.run(slot_of)
        is_base = slot_of < 0
        assert made.dtype == wanted.dtype and is_base.any()
        for buffer in (mixture.buffers.gate_up_b, mixture.buffers.down_b):
            buffer.zero_()
        found.append([torch.equal(made[is_base], wanted[is_base]), torch.equal(made, wanted),
                      torch.equal(mixture.run(slot_of), wanted)])
print(json.dumps(found))
"""


def test_base_tokens_and_zero_adapters_have_sglangs_bits():
    done = subprocess.run(
        [sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=240, cwd=Path(__file__).parent,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[True, False, True]] * 10
