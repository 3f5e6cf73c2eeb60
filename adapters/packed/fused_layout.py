"""The engine's fused layout: which projections it stacks, and the shapes of their factors.

qkv_proj       A [3 rank, in]: of q, k, v, one below the other    B [out_q + out_k + out_v, rank]
gate_up_proj   A [2 rank, in]: of gate, up                        B [2 intermediate, rank]
o_proj, down_proj   A [rank, in]                                  B [out, rank]

and of each expert of a mixture, with the experts' own rank and intermediate size, as SGLang keeps them in a slot:

gate_up_proj_moe    A [2 rank, in]: of gate, up                   B [2 intermediate, rank]
down_proj_moe       A [rank, in]                                  B [out, rank]
"""

from __future__ import annotations

from adapters.model.base_model import FUSED_MODULES, BaseModel

# An engine module and the projections in it, in the model's order.
PARTS_OF: dict[str, tuple[str, ...]] = {
    "qkv_proj": FUSED_MODULES["qkv_proj"],
    "o_proj": ("o_proj",),
    "gate_up_proj": FUSED_MODULES["gate_up_proj"],
    "down_proj": ("down_proj",),
}
ENGINE_MODULE_OF = {part: module for module, parts in PARTS_OF.items() for part in parts}


def part_rows(base: BaseModel, module: str) -> tuple[int, ...]:
    """The rows of each part in an engine module's B."""
    return tuple(base.shape_of(part)[0] for part in PARTS_OF[module])


# As above, for every expert.
EXPERT_PARTS_OF: dict[str, tuple[str, ...]] = {
    "gate_up_proj_moe": FUSED_MODULES["gate_up_proj"],
    "down_proj_moe": ("down_proj",),
}
EXPERT_MODULE_OF = {part: module for module, parts in EXPERT_PARTS_OF.items() for part in parts}


def expert_part_rows(base: BaseModel, module: str) -> tuple[int, ...]:
    """As `part_rows`, for one expert. Raises KeyError for a base model without experts."""
    return tuple(base.expert_shape_of(part)[0] for part in EXPERT_PARTS_OF[module])
