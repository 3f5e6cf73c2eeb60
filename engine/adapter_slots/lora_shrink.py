"""GPU kernel for LoRA's shrink step, A x, and for ReFT's, A (hidden + residual) + bias. Replaces SGLang's kernel.

Shapes: T tokens, K inputs, R the largest rank that the engine takes, n slices (q, k and v; gate and up; or one). A has
[n R, K] per slot, whose first rows are the slices' of the adapter's own rank; so has row t of the output [T, n R].
Tokens of one adapter come in segments of at most `batch_info.max_len`, through a permutation.

The step reads much and computes little, so it is as fast as its reads. SGLang's kernel has one program per segment of
128 tokens and 16 columns: 16 to 48 programs for a prompt of 2,048 tokens, on the 132 multiprocessors of an H100. Each
reads its tokens again for every 16 columns. Here a program takes up to 64 tokens and 64 columns, so x is read once
where n R is at most 64. Where that gives too few programs, several share the inputs of one tile, and the one that ends
last adds what they have made.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from engine.adapter_slots.lora_expand import segments_in

_MOST_COLUMNS = 64  # of a program; more would not stay in registers beside the tokens
_MOST_ROWS = 64  # tokens of a program
_MOST_SPLITS = 4  # programs that share a tile's inputs
_FEWEST_INPUTS = 512  # of each of them
_MOST_TILES = 1 << 16  # whose inputs can be shared
_FEWEST_ROWS = 16  # and columns; tensor cores take no fewer
_MOST_ROWS_WITH_RESIDUAL = 32  # more would not stay in registers, since both tiles pass through them
_MOST_BLOCK_K = 256
_FEWEST_BLOCK_K = 32
_NUM_WARPS = 4
_MOST_STAGES, _FEWEST_STAGES = 4, 2  # steps over K that are loaded ahead
_INTERPRETED = (32, 227 * 1024)  # multiprocessors, bytes of shared memory


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x, residual, weights, bias, output, sums, arrivals, num_tokens, seg_indptr, weight_indices, lora_ranks, permutation,
    NUM_SLICES: tl.constexpr,
    N: tl.constexpr,  # n R
    K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,  # programs per segment
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,  # programs that share the inputs of one tile
    SPLIT_K: tl.constexpr,  # inputs of each, a multiple of BLOCK_K
):  # fmt: skip
    segment = tl.program_id(0) // PARTS
    begin = tl.load(seg_indptr + segment) + tl.program_id(0) % PARTS * BLOCK_M
    end = tl.load(seg_indptr + segment + 1)
    if begin >= end:
        return
    slot = tl.load(weight_indices + segment)
    columns = tl.minimum(tl.load(lora_ranks + slot) * NUM_SLICES, N)
    first = tl.program_id(1) * BLOCK_N
    if first >= columns:
        return
    tokens = begin + tl.arange(0, BLOCK_M)
    is_row = tokens < end
    rows = tl.load(permutation + tokens, mask=is_row, other=0).to(tl.int64)
    n = first + tl.arange(0, BLOCK_N)
    is_column = n < columns
    k = tl.program_id(2) * SPLIT_K + tl.arange(0, BLOCK_K)
    offsets = rows[:, None] * K + k[None, :]
    w_pointers = weights + slot.to(tl.int64) * (N * K) + n[None, :] * K + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, SPLIT_K, BLOCK_K):
        if K == SPLITS * SPLIT_K:
            is_x = is_row[:, None]
            is_w = is_column[None, :]
        else:
            is_k = k + start < K
            is_x = is_row[:, None] & is_k[None, :]
            is_w = is_k[:, None] & is_column[None, :]
        x_tile = tl.load(x + offsets + start, mask=is_x, other=0.0)
        if HAS_RESIDUAL:  # rounded as the sum of two tensors is
            more = tl.load(residual + offsets + start, mask=is_x, other=0.0)
            x_tile = (x_tile.to(tl.float32) + more.to(tl.float32)).to(x_tile.dtype)
        total += tl.dot(x_tile, tl.load(w_pointers + start, mask=is_w, other=0.0))
    is_made = is_row[:, None] & is_column[None, :]
    if SPLITS > 1:
        # The program that comes last adds all parts, in their order: the same input gives the same bits.
        parts = sums + rows[:, None] * N + n[None, :]
        tl.store(parts + tl.program_id(2) * num_tokens.to(tl.int64) * N, total, mask=is_made)
        tl.debug_barrier()  # the parts of all threads are written before one thread says so
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(arrivals + tile, 0)  # for the next launch
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for part in range(SPLITS):
            total += tl.load(parts + part * num_tokens.to(tl.int64) * N, mask=is_made, other=0.0, cache_modifier=".cg")
    made = total.to(output.dtype.element_ty)
    if HAS_BIAS:
        added = tl.load(bias + slot * N + n, mask=is_column, other=0.0)
        made = (made.to(tl.float32) + added.to(tl.float32)[None, :]).to(output.dtype.element_ty)
    tl.store(output + rows[:, None] * N + n[None, :], made, mask=is_made)


_arrivals_of: dict[torch.device, torch.Tensor] = {}


def _arrivals(device: torch.device, tiles: int) -> torch.Tensor | None:
    """A zero for each tile, which the kernel leaves as zeros; None if there are too many tiles.

    Launches take turns with it, so all have to be on one stream.
    """
    if tiles > _MOST_TILES:
        return None
    if device not in _arrivals_of:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None  # it would belong to the graph
        _arrivals_of[device] = torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)
    return _arrivals_of[device]


@cache
def _gpu(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return _INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def rows_and_splits_for(num_tokens: int, most_rows: int, inputs: int, multiprocessors: int) -> tuple[int, int]:
    """Tokens of a program, and programs that share the inputs of these tokens.

    Every program reads its tokens' A, so few tokens per program mean many reads of A; a share of the inputs needs only
    a share of A. But what the programs of a tile have made must be written, read and added. Half as many programs as
    multiprocessors were the fastest on an H100.
    """
    rows = min(most_rows, _MOST_ROWS)
    while rows > _FEWEST_ROWS and num_tokens <= rows // 2:
        rows //= 2
    splits = multiprocessors // (2 * triton.cdiv(num_tokens, rows))
    return rows, max(1, min(splits, _MOST_SPLITS, inputs // _FEWEST_INPUTS))


def block_n_for(columns: int) -> int:
    """Columns of a program."""
    return min(_MOST_COLUMNS, max(_FEWEST_ROWS, triton.next_power_of_2(columns)))


def steps_for(rows: int, columns: int, inputs: int, element_bytes: int, shared_bytes: int) -> tuple[int, int]:
    """Elements of K per step, and steps that are loaded ahead: as many as shared memory has room for.

    `rows` are those of x and of the residual, `columns` rows of A.
    """
    block_k = min(_MOST_BLOCK_K, max(16, triton.next_power_of_2(inputs)))
    while True:
        step_bytes = (rows + columns) * block_k * element_bytes
        stages = min(_MOST_STAGES, shared_bytes // step_bytes)
        if stages >= _FEWEST_STAGES or block_k <= _FEWEST_BLOCK_K:
            return block_k, max(_FEWEST_STAGES, stages)
        block_k //= 2


def shrink(
    x: torch.Tensor,
    weights: torch.Tensor,
    batch_info: Any,
    num_slices: int,
    *,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """A (x + residual) + bias, [T, n R], of each token's A in `weights` [S, n R, K] and bias [S, n R]; x [T, K].

    `batch_info` is the batch's SGLang LoRABatchInfo. Columns beyond a token's rank are not written, nor are the rows of
    the base model's tokens.
    """
    _, all_columns, inputs = weights.shape
    assert x.is_contiguous()
    assert weights.is_contiguous()
    assert x.shape[1] == inputs
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    assert bias is None or (bias.is_contiguous() and bias.shape == weights.shape[:2])
    output = x.new_empty(len(x), all_columns)
    multiprocessors, shared_bytes = _gpu(x.device)
    most_rows = batch_info.max_len if residual is None else min(batch_info.max_len, _MOST_ROWS_WITH_RESIDUAL)
    block_n = block_n_for(all_columns)
    rows, splits = rows_and_splits_for(len(x), most_rows, inputs, multiprocessors)
    parts = triton.cdiv(batch_info.max_len, rows)
    read_rows = rows if residual is None else 2 * rows
    block_k, num_stages = steps_for(read_rows, block_n, inputs, x.element_size(), shared_bytes)
    tiles = (segments_in(batch_info, len(x), len(weights)) * parts, triton.cdiv(all_columns, block_n))
    arrivals = None if splits == 1 else _arrivals(x.device, tiles[0] * tiles[1])
    if arrivals is None:
        splits, sums, arrivals = 1, output, output
    else:
        sums = x.new_empty((splits, len(x), all_columns), dtype=torch.float32)
    split_k = triton.cdiv(triton.cdiv(inputs, splits), block_k) * block_k
    grid = (*tiles, splits)
    _shrink_kernel[grid](
        x,
        x if residual is None else residual,
        weights,
        weights if bias is None else bias,
        output,
        sums,
        arrivals,
        len(x),
        batch_info.seg_indptr,
        batch_info.weight_indices,
        batch_info.lora_ranks,
        batch_info.permutation,
        NUM_SLICES=num_slices,
        N=all_columns,
        K=inputs,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        PARTS=parts,
        BLOCK_M=rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SPLITS=splits,
        SPLIT_K=split_k,
        num_warps=_NUM_WARPS,
        num_stages=num_stages,
    )
    return output
