"""The kernels compile for a Hopper GPU, which needs none: their interpreter on a CPU accepts more than their compiler.

With the sizes of Llama-3.1-8B and rank 16, for prompts and for a few tokens.
"""

from __future__ import annotations

from typing import Any

import pytest

LARGEST_SHARED_MEMORY = 227 * 1024  # bytes of a program on compute capability 9.0 (CUDA C++ Programming Guide)
BATCH = ("seg_indptr", "weight_indices", "lora_ranks", "permutation")


def compiled(kernel: Any, constants: dict[str, Any], num_warps: int, num_stages: int) -> Any:
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"scalings": "*fp32", "slice_offsets": "*i32"} | dict.fromkeys(BATCH, "*i32")
    types |= dict.fromkeys(("output_stride", "num_tokens", "num_segments"), "i32")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
    aligned = [number for number, name in enumerate(names) if signature[name].startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(number,): [["tt.divisibility", 16]] for number in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing compiled before is taken."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(made: Any) -> None:
    assert made.asm["cubin"]
    assert made.metadata.shared <= LARGEST_SHARED_MEMORY


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("inputs", "num_slices", "is_reft"),
    [(4096, 3, False), (14336, 1, False), (4096, 1, True)],
    ids=("qkv", "down", "reft"),
)
def test_shrink(rows: int, inputs: int, num_slices: int, is_reft: bool):
    from engine.adapter_slots import lora_shrink

    constants = {
        "NUM_SLICES": num_slices,
        "N": 16 * num_slices,
        "K": inputs,
        "HAS_RESIDUAL": is_reft,
        "HAS_BIAS": is_reft,
        "PARTS": 128 // rows,
        "BLOCK_M": rows,
        "BLOCK_N": lora_shrink.block_n_for(16 * num_slices),
        "BLOCK_K": lora_shrink._BLOCK_K,
    }
    check(
        compiled(lora_shrink._shrink_kernel, constants, lora_shrink._NUM_WARPS, lora_shrink.stages_for(rows, is_reft))
    )


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 128])
def test_expand(rows: int):
    from engine.adapter_slots import lora_expand

    constants = {
        "NUM_SLICES": 3,
        "OUTPUT_DIM": 6144,
        "MAX_RANK": 16,
        "BLOCK_M": rows,
        "BLOCK_N": lora_expand._BLOCK_N,
        "BLOCK_K": lora_expand.block_k_for(16),
        "BLOCKS": lora_expand._BLOCKS_PER_PROGRAM,
    }
    check(compiled(lora_expand._expand_kernel, constants, lora_expand._NUM_WARPS, 3))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 128])
def test_gate_up(rows: int):
    from engine.adapter_slots import gate_up, lora_expand

    block_m = min(gate_up._BLOCK_M, rows)
    constants = {
        "D": 14336,
        "MAX_RANK": 16,
        "PARTS": rows // block_m,
        "BLOCK_M": block_m,
        "BLOCK_N": gate_up._BLOCK_N,
        "BLOCK_K": lora_expand.block_k_for(16),
        "BLOCKS": gate_up._BLOCKS_PER_PROGRAM,
    }
    check(compiled(gate_up._gate_up_kernel, constants, gate_up._NUM_WARPS, 3))
