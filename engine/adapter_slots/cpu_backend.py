"""SGLang's LoRA backend `torch_native` as CPUs need it, registered under that name (`engine.hooks.installation`).

It takes no page-locked memory, which a CPU build of torch refuses; and in our engines it multiplies neighbouring
segments together.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend, TorchNativeLoRABatchInfo
from sglang.srt.lora.utils import generate_sequence_lengths

from engine.adapter_slots.segment_products import expand, shrink


class UnpinnedBackend(TorchNativeLoRABackend):
    """SGLang's products, on a batch that is described without page-locked memory."""

    def prepare_lora_batch(
        self,
        forward_batch: Any,
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        use_cuda_graph: bool,
        use_prefill_cuda_graph: bool = False,
    ) -> None:
        """Describe the batch's segments, neighbours of one slot as one."""
        lengths = generate_sequence_lengths(forward_batch, device=torch.device("cpu"))
        slots, owners = torch.unique_consecutive(torch.tensor(weight_indices, dtype=torch.int32), return_inverse=True)
        merged = torch.zeros_like(slots).scatter_add_(0, owners, lengths)
        bounds = torch.zeros(len(merged) + 1, dtype=torch.int32)
        torch.cumsum(merged, 0, out=bounds[1:])
        ranks, factors = torch.tensor(lora_ranks, dtype=torch.int32), torch.tensor(scalings, dtype=torch.float)
        info = TorchNativeLoRABatchInfo(
            bs=forward_batch.batch_size,
            num_segments=len(merged),
            max_len=int(merged.max()) if len(merged) else 0,
            use_cuda_graph=False,
            seg_lens=merged,
            seg_indptr=bounds,
            weight_indices=slots,
            lora_ranks=ranks,
            scalings=factors,
            permutation=None,
            lora_ranks_cpu=ranks,
            seg_indptr_cpu=bounds,
            seg_lens_cpu=merged,
            weight_indices_cpu=slots,
            scalings_cpu=factors,
        )
        self.batch_info = self._add_moe_lora_info(forward_batch, info)


class SegmentsBackend(UnpinnedBackend):
    """Our products: sixteen short prompts under as many adapters take SGLang's seven times as long as a long one."""

    def run_lora_a_sgemm(self, x: torch.Tensor, weights: torch.Tensor, stack_num: int = 1, *_args, **_more):
        info: Any = self.batch_info
        return shrink(x, weights, info.weight_indices_cpu, info.seg_lens_cpu, info.lora_ranks_cpu, stack_num)

    def run_lora_b_sgemm(self, x: torch.Tensor, weights: torch.Tensor, output_offset_cpu, base_output=None, **_more):
        info: Any = self.batch_info
        return expand(
            x, weights, info.weight_indices_cpu, info.seg_lens_cpu, info.lora_ranks_cpu, output_offset_cpu, base_output
        )

    def run_qkv_lora(self, x, qkv_lora_a, qkv_lora_b, *, output_offset_cpu, base_output=None, n_slices=3, **_more):
        read = self.run_lora_a_sgemm(x, qkv_lora_a, n_slices)
        return self.run_lora_b_sgemm(read, qkv_lora_b, output_offset_cpu, base_output)

    def run_gate_up_lora(self, x, gate_up_lora_a, gate_up_lora_b, *, output_offset_cpu, base_output=None, **_more):
        read = self.run_lora_a_sgemm(x, gate_up_lora_a, len(output_offset_cpu) - 1)
        return self.run_lora_b_sgemm(read, gate_up_lora_b, output_offset_cpu, base_output)
