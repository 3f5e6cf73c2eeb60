# ruff: noqa: E402 Triton decides when it is imported whether it interprets
"""Checks of the expand kernel, run in a separate process; the first failed one ends it."""

import itertools
import os
import sys
from types import SimpleNamespace

DEVICE = os.environ.get("PRELUDE_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from engine.adapter_slots.lora_expand import expand

REQUESTS = ((1, 20), (2, 5), (1, 3), (0, 4), (3, 1))  # (slot, tokens); slot 0 is the base model's
SCALINGS = (0.0, 1.0, 0.5, 2.0)


def batch_of(ranks, block_m: int, num_padded: int) -> tuple[SimpleNamespace, torch.Tensor]:
    """The batch as SGLang's csgmv backend describes it, and each token's slot."""
    slots = torch.cat([torch.full((count,), slot) for slot, count in REQUESTS])
    permutation = torch.argsort(slots, stable=True)
    segments, lengths = [], []
    for slot, count in zip(*torch.unique_consecutive(slots[permutation], return_counts=True), strict=True):
        for begin in range(0, int(count), block_m):
            segments.append(int(slot))
            lengths.append(min(block_m, int(count) - begin))
    bounds = [0, *itertools.accumulate(lengths), *[len(slots)] * num_padded]

    def on_device(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    batch = SimpleNamespace(
        use_cuda_graph=num_padded > 0,
        num_segments=len(segments),
        seg_indptr=on_device(bounds),
        weight_indices=on_device(segments + [0] * num_padded),
        lora_ranks=on_device(ranks),
        scalings=torch.tensor(SCALINGS, device=DEVICE),
        permutation=permutation.to(DEVICE, torch.int32),
        max_len=block_m,
    )
    return batch, slots


def check(max_rank: int, ranks, bounds, block_m: int, num_padded: int = 0, extra_columns: int = 0) -> None:
    """Compare with the formula, token by token; the output may be a slice of a wider tensor."""
    batch, slots = batch_of(ranks, block_m, num_padded)
    num_slices = len(bounds) - 1
    x = torch.randn(len(slots), num_slices * max_rank)
    weights = torch.randn(len(ranks), bounds[-1], max_rank)
    base = torch.randn(len(slots), bounds[-1] + extra_columns)
    wanted = base.clone()
    for token, slot in enumerate(slots.tolist()):
        rank = ranks[slot]
        for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
            own = x[token, number * rank : (number + 1) * rank]
            wanted[token, begin:end] += SCALINGS[slot] * (weights[slot, begin:end, :rank] @ own)
    wide = base.to(DEVICE, copy=True)
    offsets = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    largest = max(end - begin for begin, end in itertools.pairwise(bounds))
    output = wide[:, : bounds[-1]]
    made = expand(x.to(DEVICE), weights.to(DEVICE), batch, offsets, largest, output)
    assert made.data_ptr() == output.data_ptr()
    tolerance = 1e-3 if DEVICE == "cpu" else 0.3  # a GPU's matrix units round float32 to ten bits
    torch.testing.assert_close(wide.cpu(), wanted, atol=tolerance, rtol=tolerance)
    assert torch.equal(wide[slots == 0].cpu(), base[slots == 0])  # the base model's tokens, to the last bit


def main() -> None:
    torch.manual_seed(0)
    check(16, (0, 16, 8, 16), (0, 160, 192, 224), 16)
    check(16, (0, 16, 8, 16), (0, 160, 192, 224), 32, num_padded=3)  # as in a CUDA graph
    check(16, (0, 16, 7, 1), (0, 160, 192, 224), 16)  # ranks that are no multiples
    check(16, (0, 16, 7, 1), (0, 150, 187, 224), 16, extra_columns=3)  # slices that are none
    check(1, (0, 1, 1, 1), (0, 700, 1400), 16)
    check(128, (0, 128, 100, 72), (0, 160, 192, 224), 16)  # more than one step over the rank
    batch, _ = batch_of((0, 16, 8, 16), 16, 0)
    alone = expand(
        torch.zeros(33, 16, device=DEVICE),
        torch.ones(4, 48, 16, device=DEVICE),
        batch,
        torch.tensor([0, 48], dtype=torch.int32, device=DEVICE),
        48,
        None,
    )
    assert alone.shape == (33, 48)
    assert not alone.any()


if __name__ == "__main__":
    sys.exit(main())
