"""GPU kernel for the expand step of gate and up, joined with the activation that reads its output.

Gate and up have two thirds of the columns that LoRA's expand step reads and writes in an 8B model, and SiLU reads all
of them right after. Here one kernel reads the base model's output, adds B (A x) in registers and writes
silu(gate) * up: adapted tokens cost as much memory traffic as base tokens.

Shapes: T tokens, d outputs of each of gate and up, R the largest rank that the engine takes, S slots. Row t of x
[T, 2 R] begins with A x of token t: gate's, then up's, each of the adapter's own rank. Tokens of one adapter come in
segments, through a permutation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.adapter_slots.lora_expand import block_k_for
from engine.adapter_slots.segments import segments_in

_BLOCK_M = 32  # at most; several programs share a longer segment, so that some compute while others wait for memory
_BLOCK_N = 128
_BLOCKS_PER_PROGRAM = 4  # of BLOCK_N columns: they share one read of x
_NUM_WARPS = 4


@triton.jit
def _silu_and_multiply(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _activate_adapted(
    x, weights, gate_up, output, rows, is_row, rank, first, scaling,
    D: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, BLOCK_K)
    is_x = is_row[:, None] & (k < rank)[None, :]
    gate_pointers = x + rows[:, None] * (2 * MAX_RANK) + k[None, :]
    up_pointers = gate_pointers + rank
    gate_x = tl.load(gate_pointers, mask=is_x, other=0.0)
    up_x = tl.load(up_pointers, mask=is_x, other=0.0)
    for block in range(BLOCKS):
        n = (first + block) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = is_row[:, None] & (n < D)[None, :]
        pointers = gate_up + rows[:, None] * (2 * D) + n[None, :]
        # Before the products, which need not wait for them.
        gate = tl.load(pointers, mask=mask, other=0.0)
        up = tl.load(pointers + D, mask=mask, other=0.0)
        is_w = (k < rank)[:, None] & (n < D)[None, :]
        gate_w_pointers = weights + n[None, :] * MAX_RANK + k[:, None]
        up_w_pointers = gate_w_pointers + D * MAX_RANK
        gate_sum = tl.dot(gate_x, tl.load(gate_w_pointers, mask=is_w, other=0.0))
        up_sum = tl.dot(up_x, tl.load(up_w_pointers, mask=is_w, other=0.0))
        for k_start in range(BLOCK_K, MAX_RANK, BLOCK_K):
            is_k = k + k_start < rank
            is_more_x = is_row[:, None] & is_k[None, :]
            is_more_w = is_k[:, None] & (n < D)[None, :]
            more_gate_x = tl.load(gate_pointers + k_start, mask=is_more_x, other=0.0)
            gate_sum += tl.dot(more_gate_x, tl.load(gate_w_pointers + k_start, mask=is_more_w, other=0.0))
            more_up_x = tl.load(up_pointers + k_start, mask=is_more_x, other=0.0)
            up_sum += tl.dot(more_up_x, tl.load(up_w_pointers + k_start, mask=is_more_w, other=0.0))
        # Rounded where the separate steps round: after the addition and at the end.
        gate_sum = (gate.to(tl.float32) + gate_sum * scaling).to(gate.dtype).to(tl.float32)
        up_sum = (up.to(tl.float32) + up_sum * scaling).to(up.dtype).to(tl.float32)
        made = _silu_and_multiply(gate_sum, up_sum)
        tl.store(output + rows[:, None] * D + n[None, :], made.to(gate.dtype), mask=mask)


@triton.jit
def _activate(gate_up, output, rows, is_row, first, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr):
    """Of the base model's tokens."""
    for block in range(BLOCKS):
        n = (first + block) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = is_row[:, None] & (n < D)[None, :]
        pointers = gate_up + rows[:, None] * (2 * D) + n[None, :]
        gate = tl.load(pointers, mask=mask, other=0.0)
        up = tl.load(pointers + D, mask=mask, other=0.0)
        made = _silu_and_multiply(gate.to(tl.float32), up.to(tl.float32))
        tl.store(output + rows[:, None] * D + n[None, :], made.to(gate.dtype), mask=mask)


@triton.jit
def _write_zeros(output, rows, is_row, first, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr):
    for block in range(BLOCKS):
        n = (first + block) * BLOCK_N + tl.arange(0, BLOCK_N)
        pointers = output + rows[:, None] * D + n[None, :]
        tl.store(pointers, 0.0, mask=is_row[:, None] & (n < D)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_segments"])
def _gate_up_kernel(
    x, weights, gate_up, output, num_tokens, num_segments,
    seg_indptr, weight_indices, lora_ranks, permutation, scalings,
    D: tl.constexpr,
    MAX_RANK: tl.constexpr,
    PARTS: tl.constexpr,  # programs per segment
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCKS
    segment = tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS
    begin = tl.load(seg_indptr + segment) + part * BLOCK_M
    if segment == num_segments:  # the tokens of no segment, with which a CUDA graph fills its batch up
        for start in range(begin, num_tokens, PARTS * BLOCK_M):
            rows = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
            _write_zeros(output, rows, rows < num_tokens, first, D, BLOCK_N, BLOCKS)
        return
    end = tl.load(seg_indptr + segment + 1)
    if begin >= end:
        return
    slot = tl.load(weight_indices + segment)
    rank = tl.minimum(tl.load(lora_ranks + slot), MAX_RANK)  # 0 for the base model
    tokens = begin + tl.arange(0, BLOCK_M)
    is_row = tokens < end
    rows = tl.load(permutation + tokens, mask=is_row, other=0).to(tl.int64)
    if rank == 0:
        _activate(gate_up, output, rows, is_row, first, D, BLOCK_N, BLOCKS)
        return
    scaling = tl.load(scalings + slot)
    weights += slot.to(tl.int64) * (2 * D * MAX_RANK)
    if rank % 8 == 0:  # `// 8 * 8` tells the compiler so, and it makes accesses 16 bytes wide
        _activate_adapted(
            x, weights, gate_up, output, rows, is_row, rank // 8 * 8, first, scaling,
            D, MAX_RANK, BLOCK_N, BLOCK_K, BLOCKS,
        )  # fmt: skip
    else:
        _activate_adapted(
            x, weights, gate_up, output, rows, is_row, rank, first, scaling,
            D, MAX_RANK, BLOCK_N, BLOCK_K, BLOCKS,
        )  # fmt: skip


def expand_and_activate(x: torch.Tensor, weights: torch.Tensor, batch_info: Any, gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate + B_gate x_gate) * (up + B_up x_up), [T, d].

    x [T, 2 R] is A x, `weights` [S, 2 d, R] has B of gate above that of up, and `gate_up` [T, 2 d] is the base model's
    output. `batch_info` is the batch's SGLang LoRABatchInfo, whose segments contain all tokens, also the base model's.
    Rows of tokens that fill up a CUDA graph's batch become zero.
    """
    _, output_dim, max_rank = weights.shape
    d = output_dim // 2
    assert x.is_contiguous()
    assert weights.is_contiguous()
    assert gate_up.is_contiguous()
    assert x.shape == (len(gate_up), 2 * max_rank)
    assert gate_up.shape[1] == output_dim
    output = gate_up.new_empty(len(gate_up), d)
    num_segments = segments_in(batch_info, len(gate_up), len(weights))
    block_m = min(_BLOCK_M, batch_info.max_len)
    parts = triton.cdiv(batch_info.max_len, block_m)
    grid = (triton.cdiv(d, _BLOCK_N * _BLOCKS_PER_PROGRAM), (num_segments + 1) * parts)
    _gate_up_kernel[grid](
        x,
        weights,
        gate_up,
        output,
        len(gate_up),
        num_segments,
        batch_info.seg_indptr,
        batch_info.weight_indices,
        batch_info.lora_ranks,
        batch_info.permutation,
        batch_info.scalings,
        D=d,
        MAX_RANK=max_rank,
        PARTS=parts,
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=block_k_for(max_rank),
        BLOCKS=_BLOCKS_PER_PROGRAM,
        num_warps=_NUM_WARPS,
    )
    return output
