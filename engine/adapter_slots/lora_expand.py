"""GPU kernel for LoRA's expand step, B (A x), which it adds to the projection's output. Replaces SGLang's kernel.

Shapes: T tokens, R the largest rank that the engine takes, n slices (q, k and v; gate and up; or one) of a projection
with `OUTPUT_DIM` outputs in total. Row t of x [T, n R] begins with A x of token t: its n slices, contiguous, each of
the adapter's own rank. Tokens of one adapter come in segments of at most `BLOCK_M`, through a permutation.

The kernel is memory-bound: it reads and writes the output once and computes little, so the width of its accesses
decides its speed. SGLang's kernel cannot assume that slices start at multiples of 16 and accesses single elements. On
an H200 with Llama-3.1-8B it takes eight times as long as the memory traffic requires, a third of all prefill time.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK_N = 128
_BLOCKS_PER_PROGRAM = 4  # of BLOCK_N columns: they share one read of x, and a CUDA graph's empty segments cost less
_NUM_WARPS = 4
_LARGEST_BLOCK_K = 32
_MOST_OF_FEW_TOKENS = 16  # whole segments, `init_prefill_cuda_graph_batch_info` of SGLang's csgmv backend


@triton.jit
def _add_product(
    x, weights, output, output_stride, rows, is_row, x_start, rank, first, slice_start, slice_end, scaling,
    X_STRIDE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, BLOCK_K)
    x_pointers = x + rows[:, None] * X_STRIDE + (x_start + k)[None, :]
    x_tile = tl.load(x_pointers, mask=is_row[:, None] & (k < rank)[None, :], other=0.0)
    for block in range(BLOCKS):
        n = slice_start + (first + block) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = is_row[:, None] & (n < slice_end)[None, :]
        pointers = output + rows[:, None] * output_stride + n[None, :]
        base = tl.load(pointers, mask=mask, other=0.0)
        w_pointers = weights + n[None, :] * MAX_RANK + k[:, None]
        w_tile = tl.load(w_pointers, mask=(k < rank)[:, None] & (n < slice_end)[None, :], other=0.0)
        product = tl.dot(x_tile, w_tile)
        for k_start in range(BLOCK_K, MAX_RANK, BLOCK_K):
            is_k = k + k_start < rank
            more_x = tl.load(x_pointers + k_start, mask=is_row[:, None] & is_k[None, :], other=0.0)
            more_w = tl.load(w_pointers + k_start, mask=is_k[:, None] & (n < slice_end)[None, :], other=0.0)
            product += tl.dot(more_x, more_w)
        tl.store(pointers, (base.to(tl.float32) + product * scaling).to(base.dtype), mask=mask)


@triton.jit(do_not_specialize=["output_stride"])
def _expand_kernel(
    x, weights, output, output_stride, seg_indptr, weight_indices, lora_ranks, permutation, scalings, slice_offsets,
    NUM_SLICES: tl.constexpr,
    OUTPUT_DIM: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(2)
    begin = tl.load(seg_indptr + segment)
    end = tl.load(seg_indptr + segment + 1)
    if begin == end:
        return
    slot = tl.load(weight_indices + segment)
    rank = tl.load(lora_ranks + slot)
    if rank == 0:
        return
    number = tl.program_id(1)
    slice_start = tl.load(slice_offsets + number)
    slice_end = tl.load(slice_offsets + number + 1)
    first = tl.program_id(0) * BLOCKS
    if slice_start + first * BLOCK_N >= slice_end:
        return
    rank = tl.minimum(rank, MAX_RANK)
    scaling = tl.load(scalings + slot)
    tokens = begin + tl.arange(0, BLOCK_M)
    is_row = tokens < end
    rows = tl.load(permutation + tokens, mask=is_row, other=0).to(tl.int64)
    weights += slot.to(tl.int64) * (OUTPUT_DIM * MAX_RANK)
    # `// 16 * 16` tells the compiler that these are multiples of 16, so that it makes accesses 16 bytes wide.
    if (slice_start % 16 == 0) & (slice_end % 16 == 0) & (rank % 8 == 0) & (output_stride % 16 == 0):
        _add_product(
            x, weights, output, output_stride // 16 * 16, rows, is_row, number * (rank // 8 * 8),
            rank // 8 * 8, first, slice_start // 16 * 16, slice_end // 16 * 16, scaling,
            NUM_SLICES * MAX_RANK, MAX_RANK, BLOCK_M, BLOCK_N, BLOCK_K, BLOCKS,
        )  # fmt: skip
    elif (slice_start % 16 == 0) & (slice_end % 16 == 0) & (output_stride % 16 == 0):
        _add_product(
            x, weights, output, output_stride // 16 * 16, rows, is_row, number * rank,
            rank, first, slice_start // 16 * 16, slice_end // 16 * 16, scaling,
            NUM_SLICES * MAX_RANK, MAX_RANK, BLOCK_M, BLOCK_N, BLOCK_K, BLOCKS,
        )  # fmt: skip
    else:
        _add_product(
            x, weights, output, output_stride, rows, is_row, number * rank,
            rank, first, slice_start, slice_end, scaling,
            NUM_SLICES * MAX_RANK, MAX_RANK, BLOCK_M, BLOCK_N, BLOCK_K, BLOCKS,
        )  # fmt: skip


def block_k_for(max_rank: int) -> int:
    """Columns of x per step over the rank; tensor cores take no fewer than 16."""
    return min(_LARGEST_BLOCK_K, max(16, triton.next_power_of_2(max_rank)))


def expand(
    x: torch.Tensor,
    weights: torch.Tensor,
    batch_info: Any,
    slice_offsets: torch.Tensor,
    max_slice_size: int,
    base_output: torch.Tensor | None,
    slice_offsets_cpu: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply x [T, n R] by each token's B in `weights` [S, OUTPUT_DIM, R] and add the result to the output.

    `batch_info` is the batch's SGLang LoRABatchInfo, `slice_offsets` [n + 1] the bounds of the slices in the output.
    """
    num_slices = len(slice_offsets) - 1
    _, output_dim, max_rank = weights.shape
    output = x.new_zeros(len(x), output_dim) if base_output is None else base_output
    assert x.is_contiguous()
    assert weights.is_contiguous()
    assert output.stride(1) == 1
    assert x.shape[1] == num_slices * max_rank
    grid = (
        triton.cdiv(max_slice_size, _BLOCK_N * _BLOCKS_PER_PROGRAM),
        num_slices,
        segments_in(batch_info, len(x), len(weights)),
    )
    _expand_kernel[grid](
        x,
        weights,
        output,
        output.stride(0),
        batch_info.seg_indptr,
        batch_info.weight_indices,
        batch_info.lora_ranks,
        batch_info.permutation,
        batch_info.scalings,
        slice_offsets,
        NUM_SLICES=num_slices,
        OUTPUT_DIM=output_dim,
        MAX_RANK=max_rank,
        BLOCK_M=batch_info.max_len,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=block_k_for(max_rank),
        BLOCKS=_BLOCKS_PER_PROGRAM,
        num_warps=_NUM_WARPS,
    )
    return output


def segments_in(batch_info: Any, num_tokens: int, num_slots: int) -> int:
    """Of the grid: those of the batch, or the most that a CUDA graph for so many tokens may get, many of them empty.

    Each slot's tokens end with a segment that may be short. A graph may also run a batch of fewer tokens, whose
    segments are shorter than the graph's, but SGLang gives fewer than 256 tokens at most 16 whole segments.
    """
    if not batch_info.use_cuda_graph:
        return batch_info.num_segments
    whole = max(triton.cdiv(num_tokens, batch_info.max_len), _MOST_OF_FEW_TOKENS)
    return min(len(batch_info.weight_indices), whole + num_slots)
