"""Which tokens have LoRA on experts, and the experts' products on CPUs, where SGLang's kernels do not run.

For a token x whose adapter is in slot s, and an expert e that the router has chosen for it:

    (gate, up) = W13[e] x + B13[s, e] A13[s, e] x, of which gate and up have halves of A and B
    h = silu(gate) up
    y = W2[e] h + B2[s, e] A2[s, e] h
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu


@dataclass(frozen=True, slots=True)
class ExpertBuffers:
    """The slots of one layer's experts."""

    gate_up_a: torch.Tensor  # [S, E, 2 R, hidden]
    gate_up_b: torch.Tensor  # [S, E, 2 I, R]
    down_a: torch.Tensor  # [S, E, R, I]
    down_b: torch.Tensor  # [S, E, hidden, R]


class AdaptedTokens:
    """Which tokens of the current batch have LoRA on experts."""

    def __init__(self) -> None:
        self.slot_of: torch.Tensor | None = None  # [num_tokens], -1: base experts; None: no token has any

    def begin_batch(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Set the slots of a batch's segments, -1 where the adapter has nothing on experts."""
        if any(slot >= 0 for slot in slots):
            self.slot_of = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths))

    def end_batch(self) -> None:
        """No token is adapted until the next `begin_batch`."""
        self.slot_of = None


def run_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    buffers: ExpertBuffers,
    slot_of: torch.Tensor,
) -> torch.Tensor:
    """The sum of each token's experts.

    `x` [T, hidden]; `chosen`, `shares` [T, experts per token]; `w13` [E, 2 I, hidden]; `w2` [E, hidden, I]; `slot_of`
    as in `AdaptedTokens`. Tokens are multiplied together, and their experts added, as SGLang's `moe_forward_native`
    does. So base tokens get the same bits beside adapted ones as without them.
    """
    pairs = chosen.flatten().argsort()  # of a token and an expert, by expert
    made = x.new_empty(len(pairs), w2.shape[1])
    begin = 0
    for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=len(w13)).tolist()):
        if count == 0:
            continue
        own = pairs[begin : begin + count]
        begin += count
        tokens = own // chosen.shape[1]
        read, slots = x[tokens], slot_of[tokens]
        gate_up = linear(read, w13[expert])
        _add_lora(gate_up, read, slots, buffers.gate_up_a, buffers.gate_up_b, expert, num_parts=2)
        gate, up = gate_up.chunk(2, dim=1)
        inner = silu(gate) * up
        output = linear(inner, w2[expert])
        _add_lora(output, inner, slots, buffers.down_a, buffers.down_b, expert, num_parts=1)
        made[own] = output
    weighted = made.view(*chosen.shape, -1).to(shares.dtype) * shares.unsqueeze(-1)
    return weighted.sum(dim=1).to(x.dtype)


def _add_lora(
    output: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    expert: int,
    num_parts: int,
) -> None:
    """Add one expert's B A x to `output`, in place, for the tokens that are in a slot."""
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        own = (slots == slot).nonzero()[:, 0]
        low = linear(x[own], a[slot, expert]).chunk(num_parts, dim=1)
        changes = [linear(part, own_b) for part, own_b in zip(low, b[slot, expert].chunk(num_parts), strict=True)]
        output[own] += torch.cat(changes, dim=1)
