"""From a packed revision back to the tensors of the directory that `adapters.serving` writes for the engine."""

from __future__ import annotations

import numpy as np

from adapters.base_model import name_of_module
from adapters.packed.fused_layout import PARTS_OF
from adapters.packed.reader import PackedRevision
from adapters.serving import REFT_PREFIX


def unpacked_for_engine(packed: PackedRevision) -> dict[str, np.ndarray]:
    """The tensors that `write_for_engine` writes, by name, bit for bit. Views of the packed ones, where they can be.

    bfloat16 comes as its bits, uint16. ReFT's B comes transposed, [rank, hidden], so it is not contiguous.
    """
    tensors: dict[str, np.ndarray] = {}
    rank = packed.metadata.lora_rank
    for name, module in packed.metadata.modules.items():
        a, b = packed.tensors[f"lora.{name}.a"], packed.tensors[f"lora.{name}.b"]
        for place, layer in enumerate(module.layers):
            first_row = 0
            for number, (part, rows) in enumerate(zip(PARTS_OF[name], module.part_rows, strict=True)):
                key = f"base_model.model.{name_of_module(layer, part)}"
                tensors[f"{key}.lora_A.weight"] = a[place, number * rank : (number + 1) * rank]
                tensors[f"{key}.lora_B.weight"] = b[place, first_row : first_row + rows]
                first_row += rows
    if (reft := packed.metadata.reft) is not None:
        for place, (layer, own_rank) in enumerate(zip(reft.layers, reft.ranks, strict=True)):
            tensors[f"{REFT_PREFIX}{layer}.a"] = packed.tensors["reft.a"][place, :own_rank]
            tensors[f"{REFT_PREFIX}{layer}.b"] = packed.tensors["reft.b"][place, :, :own_rank].T
            tensors[f"{REFT_PREFIX}{layer}.bias"] = packed.tensors["reft.bias"][place, :own_rank]
    return tensors
