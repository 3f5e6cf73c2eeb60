# ruff: noqa: E402 Triton decides when it is imported whether it interprets
"""Checks of the kernel that joins gate's and up's expand step with SiLU, run in a separate process."""

from __future__ import annotations

import os
import sys

DEVICE = os.environ.get("PRELUDE_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from lora_expand_cases import SCALINGS, batch_of
from torch.nn.functional import silu

from engine.adapter_slots import gate_up as joined
from engine.adapter_slots.lora_expand import expand


def check(max_rank: int, ranks, d: int, block_m: int, num_padded: int = 0, num_unused: int = 0) -> None:
    """Compare with the formula, token by token. `num_unused`: tokens that fill up a graph's batch."""
    batch, slots = batch_of(ranks, block_m, num_padded)
    num_tokens = len(slots)
    x = torch.randn(num_tokens + num_unused, 2 * max_rank)
    weights = torch.randn(len(ranks), 2 * d, max_rank)
    gate_up = torch.randn(num_tokens + num_unused, 2 * d)
    wanted = torch.zeros(num_tokens + num_unused, d)
    for token, slot in enumerate(slots.tolist()):
        rank, scaling = ranks[slot], SCALINGS[slot]
        gate = gate_up[token, :d] + scaling * (weights[slot, :d, :rank] @ x[token, :rank])
        up = gate_up[token, d:] + scaling * (weights[slot, d:, :rank] @ x[token, rank : 2 * rank])
        wanted[token] = silu(gate) * up
    made = joined.expand_and_activate(x.to(DEVICE), weights.to(DEVICE), batch, gate_up.to(DEVICE))
    tolerance = 1e-3 if DEVICE == "cpu" else 0.5  # a GPU's matrix units round float32 to ten bits
    torch.testing.assert_close(made.cpu(), wanted, atol=tolerance, rtol=tolerance)
    assert not made[num_tokens:].any()


def check_rounding() -> None:
    """In 16 bits it rounds where the separate steps do, so that both give the same answers."""
    # Triton's interpreter multiplies bfloat16 as if it were integers.
    dtype, step = (torch.float16, 2**-10) if DEVICE == "cpu" else (torch.bfloat16, 2**-7)
    ranks, d = (0, 16, 8, 16), 96
    batch, slots = batch_of(ranks, 16, 0)
    x = torch.randn(len(slots), 32, dtype=dtype, device=DEVICE)
    weights = torch.randn(len(ranks), 2 * d, 16, dtype=dtype, device=DEVICE)
    gate_up = torch.randn(len(slots), 2 * d, dtype=dtype, device=DEVICE)
    made = joined.expand_and_activate(x, weights, batch, gate_up)
    bounds = torch.tensor([0, d, 2 * d], dtype=torch.int32, device=DEVICE)
    expand(x, weights, batch, bounds, d, gate_up)
    gate, up = gate_up.float().split(d, dim=1)
    wanted = (silu(gate) * up).to(dtype)
    # One step of the type, where exp differs in its last bit; smaller than 2^-14, the steps of float16 grow.
    torch.testing.assert_close(made, wanted, atol=2**-24, rtol=step)
    same = (made == wanted).float().mean()
    assert same > 0.99, f"{same} of all values are the same"


def main() -> None:
    torch.manual_seed(0)
    check(16, (0, 16, 8, 16), 160, 16)
    check(16, (0, 16, 8, 16), 544, 32)  # more than one program's columns
    check(16, (0, 16, 7, 1), 160, 16)  # ranks that are no multiples
    check(16, (0, 16, 8, 16), 150, 16)  # columns that are none
    check(16, (0, 16, 8, 16), 544, 16, num_padded=3, num_unused=37)  # as in a CUDA graph
    check(1, (0, 1, 1, 1), 70, 16)
    check(128, (0, 128, 100, 72), 160, 16)  # more than one step over the rank
    check_rounding()
    joined._BLOCK_M = 16  # several programs per segment
    check(16, (0, 16, 8, 16), 544, 64, num_padded=3, num_unused=37)


if __name__ == "__main__":
    sys.exit(main())
