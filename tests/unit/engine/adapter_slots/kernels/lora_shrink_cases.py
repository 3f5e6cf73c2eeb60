# ruff: noqa: E402 Triton decides when it is imported whether it interprets
"""Checks of the shrink kernel, run in a separate process; the first failed one ends it."""

from __future__ import annotations

import os
import sys

DEVICE = os.environ.get("PRELUDE_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from lora_expand_cases import batch_of

from engine.adapter_slots import lora_shrink


def check(
    max_rank: int, ranks, num_slices: int, inputs: int, block_m: int, num_padded: int = 0, dtype=torch.float32
) -> None:
    """Compare with the formula, token by token."""
    batch, slots = batch_of(ranks, block_m, num_padded)
    x = torch.randn(len(slots), inputs, dtype=dtype)
    weights = torch.randn(len(ranks), num_slices * max_rank, inputs, dtype=dtype)
    made = lora_shrink.shrink(x.to(DEVICE), weights.to(DEVICE), batch, num_slices).cpu()
    assert made.shape == (len(slots), num_slices * max_rank)
    assert made.dtype == dtype
    exact = DEVICE == "cpu" and dtype == torch.float32
    tolerance = 1e-3 if exact else 2**-7 * inputs**0.5  # matrix units round; so do 16 bits
    for token, slot in enumerate(slots.tolist()):
        columns = num_slices * ranks[slot]
        wanted = weights[slot, :columns].float() @ x[token].float()
        torch.testing.assert_close(made[token, :columns].float(), wanted, atol=tolerance, rtol=2**-7)


def check_shared_inputs() -> None:
    """Programs that share a tile's inputs, as on a GPU with many multiprocessors, give the same; each time the same."""
    batch, slots = batch_of((0, 16, 8, 16), 32, 2)
    x = torch.randn(len(slots), 2100, device=DEVICE)  # the last share has fewer
    weights = torch.randn(4, 48, 2100, device=DEVICE)
    real, made = lora_shrink._gpu, []
    for multiprocessors, splits in ((1, 1), (8, 2), (1000, 4)):
        lora_shrink._gpu = lambda _device, count=multiprocessors: (count, 227 * 1024)
        assert lora_shrink.rows_and_splits_for(len(slots), 32, 2100, multiprocessors)[1] == splits
        made += [lora_shrink.shrink(x, weights, batch, 3)[slots == 1] for _ in range(2)]
        assert torch.equal(made[-1], made[-2])
    lora_shrink._gpu = real
    assert not any(counts.any() for counts in lora_shrink._arrivals_of.values())  # ready for the next launch
    for other in made[1:]:
        torch.testing.assert_close(other, made[0], atol=1e-2 if DEVICE == "cpu" else 0.5, rtol=1e-3)


def check_with_residual_and_bias(inputs: int, dtype=torch.float32) -> None:
    """As ReFT takes it: the sum, the product and the second sum are each rounded as tensors of their type are.

    A GPU's products of float32 are not the same for an operand from memory and for one that was just computed.
    """
    ranks = (0, 8, 4, 8)
    batch, slots = batch_of(ranks, 16, 0)
    x, residual = torch.randn(2, len(slots), inputs, dtype=dtype, device=DEVICE)
    weights = torch.randn(4, 8, inputs, dtype=dtype, device=DEVICE)
    bias = torch.randn(4, 8, dtype=dtype, device=DEVICE)
    made = lora_shrink.shrink(x, weights, batch, 1, residual=residual, bias=bias).cpu()
    read = lora_shrink.shrink(x + residual, weights, batch, 1)
    wanted = (read + bias[slots.to(DEVICE)]).cpu()
    for token, slot in enumerate(slots.tolist()):
        found, expected = made[token, : ranks[slot]], wanted[token, : ranks[slot]]
        if DEVICE == "cuda" and dtype == torch.float32:
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        else:
            assert torch.equal(found, expected)


def main() -> None:
    torch.manual_seed(0)
    check(16, (0, 16, 8, 16), 3, 256, 16)
    check(16, (0, 16, 8, 16), 2, 512, 32, num_padded=3)  # two steps over the inputs; as in a CUDA graph
    check(16, (0, 16, 7, 1), 1, 300, 16)  # ranks and inputs that are no multiples
    check(1, (0, 1, 1, 1), 1, 70, 16)
    check(16, (0, 16, 8, 16), 3, 1100, 16)  # two programs share the inputs
    check(16, (0, 16, 7, 1), 1, 1500, 64, num_padded=3)
    check(128, (0, 128, 100, 72), 1, 1100, 16)
    check(128, (0, 128, 100, 72), 1, 160, 16)  # more columns than one program takes
    # Triton's interpreter multiplies bfloat16 as if it were integers.
    check(16, (0, 16, 8, 16), 3, 256, 64, dtype=torch.float16 if DEVICE == "cpu" else torch.bfloat16)
    check_with_residual_and_bias(256)
    check_with_residual_and_bias(1100)
    check_with_residual_and_bias(300, dtype=torch.float16 if DEVICE == "cpu" else torch.bfloat16)
    check_shared_inputs()


if __name__ == "__main__":
    sys.exit(main())
