"""Read what engines load without any of Prelude's readers: what tests of packing and of slots compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The projections that one engine module stacks, in the order of their rows; and the block of a projection.
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PARENT = {"qkv_proj": "self_attn", "o_proj": "self_attn", "gate_up_proj": "mlp", "down_proj": "mlp"}


@dataclass(frozen=True, slots=True)
class ServingForm:
    """What `write_for_engine` wrote. Tensors keep the dtype of the file."""

    lora: Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # module's dotted name -> A [r, in], B [out, r]
    reft: Mapping[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # layer -> A, B [r, hidden], bias [r]
    scale: float
    # (layer, expert, projection) -> A [r, in], B [out, r]
    experts: Mapping[tuple[int, int, str], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> ServingForm:
        """Read a directory. Raises ValueError for a tensor that this check does not know."""
        from safetensors import safe_open

        config = json.loads((directory / "adapter_config.json").read_text())
        with safe_open(directory / "packed.safetensors", "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
        lora: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for module, place in json.loads(metadata["lora"])["modules"].items():
            stacked_a, stacked_b = tensors.pop(f"lora.{module}.a"), tensors.pop(f"lora.{module}.b")
            parts = _STACKED.get(module, (module,))
            for layer, a, b in zip(place["layers"], stacked_a, stacked_b, strict=True):
                rows = b.split(place["part_rows"])
                for part, own_a, own_b in zip(parts, a.chunk(len(parts)), rows, strict=True):
                    lora[f"model.layers.{layer}.{_PARENT[module]}.{part}"] = (own_a, own_b)
        experts: dict[tuple[int, int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        for module, place in json.loads(metadata.get("experts", "{}")).get("modules", {}).items():
            parts = _STACKED.get(module.removesuffix("_moe"), ("down_proj",))
            stacked_a, stacked_b = tensors.pop(f"lora.{module}.a"), tensors.pop(f"lora.{module}.b")
            places = [
                (layer, expert)
                for layer, ranges in zip(place["layers"], place["experts"], strict=True)
                for first, last in ranges
                for expert in range(first, last + 1)
            ]
            for (layer, expert), a, b in zip(places, stacked_a, stacked_b, strict=True):
                for part, own_a, own_b in zip(parts, a.chunk(len(parts)), b.split(place["part_rows"]), strict=True):
                    experts[layer, expert, part] = (own_a, own_b)
        reft = {}
        if layers := json.loads(metadata["reft"]).get("layers"):
            a, b, bias = (tensors.pop(f"reft.{name}") for name in ("a", "b", "bias"))
            reft = {layer: (a[place], b[place].T, bias[place]) for place, layer in enumerate(layers)}
        if tensors:
            raise ValueError(
                f"the serving form has the tensors {', '.join(tensors)}, which the self-check cannot apply"
            )
        return cls(lora, reft, config["lora_alpha"] / config["r"], experts)
