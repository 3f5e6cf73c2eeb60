"""The engine's fused layout: which projections it stacks, and the shapes of their factors.

qkv_proj       A [3 rank, in]: of q, k, v, one below the other    B [out_q + out_k + out_v, rank]
gate_up_proj   A [2 rank, in]: of gate, up                        B [2 intermediate, rank]
o_proj, down_proj   A [rank, in]                                  B [out, rank]

and of each expert of a mixture, with the experts' own rank and intermediate size, as SGLang keeps them in a slot:

gate_up_proj_moe    A [2 rank, in]: of gate, up                   B [2 intermediate, rank]
down_proj_moe       A [rank, in]                                  B [out, rank]
"""

from adapters.model.base_model import FUSED_MODULES, BaseModel

# An engine module and the projections in it, in the model's order.
PARTS_OF: dict[str, tuple[str, ...]] = {
    "qkv_proj": FUSED_MODULES["qkv_proj"],
    "o_proj": ("o_proj",),
    "gate_up_proj": FUSED_MODULES["gate_up_proj"],
    "down_proj": ("down_proj",),
}
ENGINE_MODULE_OF = {part: module for module, parts in PARTS_OF.items() for part in parts}


# As above, for every expert.
EXPERT_PARTS_OF: dict[str, tuple[str, ...]] = {
    "gate_up_proj_moe": FUSED_MODULES["gate_up_proj"],
    "down_proj_moe": ("down_proj",),
}
EXPERT_MODULE_OF = {part: module for module, parts in EXPERT_PARTS_OF.items() for part in parts}
ALL_PARTS_OF = PARTS_OF | EXPERT_PARTS_OF


def part_shapes(base: BaseModel, module: str) -> list[tuple[int, int]]:
    """(out, in) of each part in an engine module. Raises KeyError for experts of a base model without any."""
    shape_of = base.expert_shape_of if module in EXPERT_PARTS_OF else base.shape_of
    return [shape_of(part) for part in ALL_PARTS_OF[module]]
