"""How many segments of a batch the GPU kernels of adapters have programs for."""

from __future__ import annotations

from typing import Any

import triton

_MOST_OF_FEW_TOKENS = 16  # whole segments, `init_prefill_cuda_graph_batch_info` of SGLang's csgmv backend


def segments_in(batch_info: Any, num_tokens: int, num_slots: int) -> int:
    """Of the grid: those of the batch, or the most that a CUDA graph for so many tokens may get, many of them empty.

    Each slot's tokens end with a segment that may be short. A graph may also run a batch of fewer tokens, whose
    segments are shorter than the graph's, but SGLang gives fewer than 256 tokens at most 16 whole segments.
    """
    if not batch_info.use_cuda_graph:
        return batch_info.num_segments
    whole = max(triton.cdiv(num_tokens, batch_info.max_len), _MOST_OF_FEW_TOKENS)
    return min(len(batch_info.weight_indices), whole + num_slots)
