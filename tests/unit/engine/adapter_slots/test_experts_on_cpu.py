"""LoRA on experts on CPUs leaves base tokens alone; `tests/engine/test_experts.py` has what adapted ones become."""

import pytest
import torch

from engine.adapter_slots.experts import ExpertBuffers, run_experts

SLOTS, EXPERTS, PER_TOKEN, TOKENS = 3, 5, 2, 40
HIDDEN, INTERMEDIATE, RANK = 12, 7, 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_base_tokens_have_the_same_bits_beside_adapted_ones(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x, w13, w2 = (
        random(TOKENS, HIDDEN),
        random(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        random(EXPERTS, HIDDEN, INTERMEDIATE),
    )
    buffers = ExpertBuffers(
        random(SLOTS, EXPERTS, 2 * RANK, HIDDEN),
        random(SLOTS, EXPERTS, 2 * INTERMEDIATE, RANK),
        random(SLOTS, EXPERTS, RANK, INTERMEDIATE),
        random(SLOTS, EXPERTS, HIDDEN, RANK),
    )
    scores = torch.rand(TOKENS, EXPERTS - 1, generator=generator)  # the last expert is never chosen
    shares, chosen = scores.softmax(dim=1).topk(PER_TOKEN, dim=1)
    slot_of = torch.randint(-1, SLOTS, (TOKENS,), generator=generator)
    base, mixed = (
        run_experts(x, chosen, shares, w13, w2, buffers, slots) for slots in (torch.full((TOKENS,), -1), slot_of)
    )
    assert mixed.dtype == dtype
    assert torch.equal(mixed[slot_of < 0], base[slot_of < 0])
    assert not torch.isclose(mixed[slot_of >= 0], base[slot_of >= 0], rtol=0.01).all(dim=1).any()
