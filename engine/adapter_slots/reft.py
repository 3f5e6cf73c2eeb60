"""ReFT inside an engine: h + B^T (A h + b) on the residual stream after a layer, for many adapters in one batch.

Shapes: T tokens, d hidden size, R the largest rank that the engine takes, S slots, L layers. The scale is folded
into B. Every tensor-parallel rank holds whole factors: the residual stream after a layer is whole on each of them.

The two products are SGLang's segmented LoRA kernels: csgmv on GPU, loops over segments on a CPU. They run in a LoRA
backend of our own, which knows the ReFT ranks of a batch as the LoRA manager's knows its LoRA ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class ReftFactors:
    """One adapter's changes of the n layers that it changes, stacked; zeros beyond a layer's own rank."""

    layers: torch.Tensor  # [n], their numbers
    a: torch.Tensor  # [n, rank, d]
    b: torch.Tensor  # [n, d, rank]
    bias: torch.Tensor  # [n, rank]

    @property
    def rank(self) -> int:
        return self.bias.shape[1]


class ReftPool:
    """The factors of the adapters that are in slots. SGLang's memory pool owns the slots; this one follows it."""

    def __init__(
        self, num_slots: int, num_layers: int, max_rank: int, hidden: int, dtype: torch.dtype, device: Any, backend: Any
    ) -> None:
        """`backend`: an SGLang LoRA backend for `num_slots` adapters that nobody else prepares batches for."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(num_layers, num_slots, *shape, dtype=dtype, device=device)

        self.a = zeros(max_rank, hidden)  # [L, S, R, d]
        self.b = zeros(hidden, max_rank)  # [L, S, d, R]
        self.bias = zeros(max_rank)  # [L, S, R]
        self.is_active = False  # in the batch that runs
        self._ranks = [0] * num_slots  # 0: no ReFT in this slot
        self._backend = backend
        self._bounds = torch.tensor([0, hidden], dtype=torch.int32, device=device)  # one slice: the whole stream
        self._bounds_cpu = self._bounds.cpu()
        self._slot_of_token = self._bounds[:0]  # [T] or more
        self._slot_of_token_in_graphs = self._slot_of_token

    def fill(self, slot: int, factors: ReftFactors | None) -> None:
        """Put an adapter's factors, or none, into a slot; nothing of the slot's former adapter stays."""
        if self._ranks[slot]:
            for buffer in (self.a, self.b, self.bias):
                buffer[:, slot].zero_()
        self._ranks[slot] = 0 if factors is None else factors.rank
        if factors is not None:
            layers, a, b, bias = (
                each.to(self.a.device, non_blocking=True)
                for each in (factors.layers, factors.a, factors.b, factors.bias)
            )
            self.a[layers, slot, : factors.rank] = a
            self.b[layers, slot, :, : factors.rank] = b
            self.bias[layers, slot, : factors.rank] = bias

    def allow_graphs(self, max_num_tokens: int) -> None:
        """Before prefill CUDA graphs are captured, which read a batch's slots where they were at capture."""
        self._backend.init_prefill_cuda_graph_batch_info(max_num_tokens)
        self._slot_of_token_in_graphs = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.a.device)

    def begin_batch(
        self, batch: Any, slots: Sequence[int] | None, lengths: Sequence[int], in_graph: bool = False
    ) -> None:
        """Say which slot each segment of the batch that runs next is under, and of how many tokens it is.

        `batch` is what a LoRA backend prepares itself for: an SGLang forward batch of these segments. Slots of None
        stand for a batch of the base model's. `in_graph`: a prefill CUDA graph may run it, or is captured with it;
        graphs have ReFT's kernels in them, so they must know that it has no ReFT, too.
        """
        ranks = [0] * len(self._ranks) if slots is None else self._ranks
        slots = [0] * len(lengths) if slots is None else list(slots)
        self.is_active = in_graph or any(ranks[slot] for slot in slots)
        if not self.is_active:
            return
        self._backend.prepare_lora_batch(
            forward_batch=batch,
            weight_indices=slots,
            lora_ranks=ranks,
            scalings=[1.0] * len(ranks),
            use_cuda_graph=False,
            use_prefill_cuda_graph=in_graph,
        )
        per_token = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths))
        if self.a.is_cuda:
            per_token = per_token.pin_memory()
        if in_graph:
            self._slot_of_token = self._slot_of_token_in_graphs
            self._slot_of_token[: len(per_token)].copy_(per_token, non_blocking=True)
        else:
            self._slot_of_token = per_token.to(self.a.device, non_blocking=True)

    def end_batch(self) -> None:
        """No ReFT acts until the next `begin_batch`."""
        self.is_active = False

    def apply(self, layer: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Add each segment's change to `hidden` [T, d] in place. The residual stream is `hidden + residual`."""
        stream = hidden if residual is None else hidden + residual
        read = self._backend.run_lora_a_sgemm(stream, self.a[layer])  # [T, R]
        read += self.bias[layer].index_select(0, self._slot_of_token[: len(hidden)])
        self._backend.run_lora_b_sgemm(
            read,
            self.b[layer],
            output_offset=self._bounds,
            output_offset_cpu=self._bounds_cpu,
            base_output=hidden,
        )
