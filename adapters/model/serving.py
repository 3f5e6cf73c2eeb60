"""Convert an adapter's values for an engine: serving dtype, scales folded into B, range checks."""

from typing import Literal

import numpy as np

from adapters.errors import AdapterIncompatible
from adapters.model.base_model import FUSED_MODULES, MODULES
from adapters.model.normal_form import ExpertFactors, LoraFactors, ReftFactors

EngineDtype = Literal["float32", "bfloat16", "float16"]
_EXPERTS_NOT_SERVED = (
    "it has LoRA on experts, which is imported and packed, but not applied by engines without "
    "adapter_limits.max_expert_rank: set it, or train on the projections of attention only"
)
_LARGEST = {"float32": 3.4028234e38, "bfloat16": 3.3895313e38, "float16": 65504.0}


def why_experts_are_refused(rank: int, max_expert_rank: int) -> str:
    """Why workers refuse LoRA of this rank on experts; empty if they accept it, or if there is none (rank 0)."""
    if rank <= max_expert_rank:
        return ""
    if max_expert_rank == 0:
        return _EXPERTS_NOT_SERVED
    return (
        f"it has LoRA of rank {rank} on experts, and workers take at most {max_expert_rank}: train with a lower rank, "
        "or raise adapter_limits.max_expert_rank"
    )


def engine_modules(modules: set[str]) -> tuple[str, ...]:
    """The modules, with the siblings that SGLang stacks with them, in the model's order."""
    needed = set(modules)
    for parts in FUSED_MODULES.values():
        if needed & set(parts):
            needed |= set(parts)
    return tuple(module for module in MODULES if module in needed)


def scaled_lora_b(factors: LoraFactors | ExpertFactors) -> np.ndarray:
    """s B [out, rank] as float32; infinite where it overflows."""
    with np.errstate(over="ignore"):
        scaled = (factors.b.astype(np.float64) * factors.scale).astype(np.float32)
    return scaled + np.float32(0)  # a negative scale makes -0.0 of 0.0


def scaled_reft_b(factors: ReftFactors) -> np.ndarray:
    """s B [rank, hidden] as float32; infinite where it overflows."""
    with np.errstate(over="ignore"):
        return factors.b * np.float32(factors.scale) + np.float32(0)


def check_fits(what: str, values: np.ndarray, dtype: EngineDtype) -> None:
    """Raise AdapterIncompatible if a value is too large for the dtype."""
    if not (largest := float(np.abs(values).max(initial=0))) <= _LARGEST[dtype]:
        raise AdapterIncompatible(
            f"{what} has a value of {largest:.3g}, too large for {dtype}; serve the model in a wider dtype or train "
            "with a smaller lora_alpha"
        )
