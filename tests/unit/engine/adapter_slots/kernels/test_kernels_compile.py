"""The kernels compile for GPUs, which needs none: their interpreter on a CPU accepts more than their compiler.

With the sizes of Llama-3.1-8B, for prompts and for a few tokens.
"""

from typing import Any

import pytest

# Bytes of a program by compute capability (CUDA C++ Programming Guide): A100, L40S, H100.
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
BATCH = ("seg_indptr", "weight_indices", "lora_ranks", "permutation")


def compiled(kernel: Any, constants: dict[str, Any], num_warps: int, num_stages: int, capability: int = 90) -> Any:
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"scalings": "*fp32", "sums": "*fp32"} | dict.fromkeys((*BATCH, "slice_offsets", "arrivals"), "*i32")
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
    return compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing compiled before is taken."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(made: Any, capability: int = 90) -> None:
    assert made.asm["cubin"]
    assert made.metadata.shared <= SHARED_MEMORY[capability]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "splits"), [(16, 4), (64, 1), (64, 4)])
@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize(
    ("inputs", "columns", "is_reft"),
    [(4096, 48, False), (14336, 64, False), (4096, 16, True)],
    ids=("qkv", "64", "reft"),
)
def test_shrink(rows: int, splits: int, capability: int, inputs: int, columns: int, is_reft: bool):
    from engine.adapter_slots import lora_shrink

    if is_reft:
        rows = min(rows, lora_shrink._MOST_ROWS_WITH_RESIDUAL)
    block_n = lora_shrink.block_n_for(columns)
    block_k, num_stages = lora_shrink.steps_for(
        2 * rows if is_reft else rows, block_n, inputs, 2, SHARED_MEMORY[capability]
    )
    constants = {
        "NUM_SLICES": 3 if columns == 48 else 1,
        "N": columns,
        "K": inputs,
        "HAS_RESIDUAL": is_reft,
        "HAS_BIAS": is_reft,
        "PARTS": 128 // rows,
        "BLOCK_M": rows,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "SPLITS": splits,
        "SPLIT_K": inputs // splits,
    }
    made = compiled(lora_shrink._shrink_kernel, constants, lora_shrink._NUM_WARPS, num_stages, capability)
    check(made, capability)


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
