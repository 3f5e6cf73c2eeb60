"""ReFT inside an engine: h + B^T (A h + b) on the residual stream after a layer, for many adapters per batch.

Shapes: T tokens, d hidden size, R the largest rank that the engine takes, S slots, L layers. The scale is folded
into B. Every tensor-parallel rank holds the full factors, because each has the full residual stream after a layer.

Segmented LoRA kernels compute the two products: those of csgmv on GPUs, loops over segments on a CPU. They run in a
second LoRA backend, which has a batch's ReFT ranks as the LoRA manager's backend has its LoRA ranks. On GPUs the first
one also adds the residual and the bias, and reads nothing of tokens without ReFT, which the graphs of all prompts have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class ReftFactors:
    """One adapter's factors for the n layers that it changes, stacked and zero-padded to the same rank."""

    layers: torch.Tensor  # [n], their numbers
    a: torch.Tensor  # [n, rank, d]
    b: torch.Tensor  # [n, d, rank]
    bias: torch.Tensor  # [n, rank]

    @property
    def rank(self) -> int:
        return self.bias.shape[1]


class ReftPool:
    """The ReFT factors of the adapters in slots. SGLang's memory pool owns the slots; this pool mirrors them."""

    def __init__(
        self, num_slots: int, num_layers: int, max_rank: int, hidden: int, dtype: torch.dtype, device: Any, backend: Any
    ) -> None:
        """`backend`: an SGLang LoRA backend for `num_slots` adapters, used by this pool only."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(num_layers, num_slots, *shape, dtype=dtype, device=device)

        self.a = zeros(max_rank, hidden)  # [L, S, R, d]
        self.b = zeros(hidden, max_rank)  # [L, S, d, R]
        self.bias = zeros(max_rank)  # [L, S, R]
        self.is_active = False  # in the current batch
        self._ranks = [0] * num_slots  # 0: no ReFT in this slot
        self._backend = backend
        self._has_sums = self.a.is_cuda and backend.name == "csgmv"  # its first product adds residual and bias
        self._bounds = torch.tensor([0, hidden], dtype=torch.int32, device=device)  # one slice: the full stream
        self._bounds_cpu = self._bounds.cpu()
        self._slot_of_token = self._bounds[:0]  # [T] or more
        self._slot_of_token_in_graphs = self._slot_of_token

    def fill(self, slot: int, factors: ReftFactors | None) -> None:
        """Put an adapter's factors, or none, into a slot. Clears the previous adapter's factors."""
        if self._ranks[slot]:
            for buffer in (self.a, self.b, self.bias):
                buffer[:, slot].zero_()
        self._ranks[slot] = 0 if factors is None else factors.rank
        if factors is not None:
            layers, a, b, bias = (
                tensor.to(self.a.device, non_blocking=True)
                for tensor in (factors.layers, factors.a, factors.b, factors.bias)
            )
            self.a[layers, slot, : factors.rank] = a
            self.b[layers, slot, :, : factors.rank] = b
            self.bias[layers, slot, : factors.rank] = bias

    def allow_graphs(self, max_num_tokens: int) -> None:
        """Allocate, before capture, the fixed buffers that prefill CUDA graphs read a batch's slots from."""
        self._backend.init_prefill_cuda_graph_batch_info(max_num_tokens)
        if self._has_sums:
            return
        self._slot_of_token_in_graphs = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.a.device)

    def begin_batch(
        self, batch: Any, slots: Sequence[int] | None, lengths: Sequence[int], in_graph: bool = False
    ) -> None:
        """Set slot and length of each segment of the next batch.

        `batch` is the SGLang forward batch of these segments, for the LoRA backend. `slots` is None for a batch of
        base tokens. `in_graph`: a prefill CUDA graph may run this batch or is captured with it. A graph contains
        ReFT's kernels, so the backend is prepared even for a batch without ReFT.
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
        if self._has_sums:
            return
        per_token = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths))
        if self.a.is_cuda:
            per_token = per_token.pin_memory()
        if in_graph:
            self._slot_of_token = self._slot_of_token_in_graphs
            self._slot_of_token[: len(per_token)].copy_(per_token, non_blocking=True)
        else:
            self._slot_of_token = per_token.to(self.a.device, non_blocking=True)

    def end_batch(self) -> None:
        """Disable ReFT until the next `begin_batch`."""
        self.is_active = False

    def apply(self, layer: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Add each segment's change to `hidden` [T, d] in place. The residual stream is `hidden + residual`."""
        self._backend.run_lora_b_sgemm(
            self._read(layer, hidden, residual),
            self.b[layer],
            output_offset=self._bounds,
            output_offset_cpu=self._bounds_cpu,
            base_output=hidden,
        )

    def _read(self, layer: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """A h + b, [T, R]."""
        if self._has_sums:
            from engine.adapter_slots.lora_shrink import shrink  # CPU engines have no triton

            return shrink(hidden, self.a[layer], self._backend.batch_info, 1, residual=residual, bias=self.bias[layer])
        stream = hidden if residual is None else hidden + residual
        read = self._backend.run_lora_a_sgemm(stream, self.a[layer])
        read += self.bias[layer].index_select(0, self._slot_of_token[: len(hidden)])
        return read
