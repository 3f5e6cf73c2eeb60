"""Read and apply an adapter's serving form without any of Prelude's readers. Needs torch.

It is one half of what the self-check compares, so it must share no code with `adapters.packed` and `adapters.formats`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    num_bytes: int
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
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
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
        return cls(lora, reft, config["lora_alpha"] / config["r"], num_bytes, experts)

    @contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """Adapt every token that the model reads inside the block by this form, in float32."""
        modules = dict(model.named_modules())
        hooks = []
        with_experts = {layer: modules[f"model.layers.{layer}.mlp.experts"] for layer, _, _ in self.experts}
        try:
            for layer, module in with_experts.items():
                module.forward = self._running_experts(module, layer)
            for name, (a, b) in self.lora.items():
                hooks.append(modules[name].register_forward_hook(_adding_lora(a.float(), b.float(), self.scale)))
            for layer, (a, b, bias) in self.reft.items():
                hook = _adding_reft(a.float(), b.float(), bias.float())
                hooks.append(modules[f"model.layers.{layer}"].register_forward_hook(hook))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module in with_experts.values():
                del module.forward  # back to its class's

    def _running_experts(self, module: Any, layer: int) -> Any:
        """A forward of a layer's experts, one by one, with this form's LoRA beside their weights."""
        import torch
        from torch.nn.functional import linear

        def changed(values: torch.Tensor, weight: torch.Tensor, expert: int, part: str) -> torch.Tensor:
            result = linear(values, weight)
            if (pair := self.experts.get((layer, expert, part))) is not None:
                result = result + linear(linear(values, pair[0].float()), pair[1].float()) * self.scale
            return result

        def forward(stream: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
            """`stream` [tokens, hidden]; `chosen` and `shares` [tokens, experts per token]."""
            total = torch.zeros_like(stream)
            for expert in chosen.unique().tolist():
                tokens, places = torch.where(chosen == expert)
                gate, up = module.gate_up_proj[expert].chunk(2)
                read = stream[tokens]
                inner = module.act_fn(changed(read, gate, expert, "gate_proj")) * changed(read, up, expert, "up_proj")
                output = changed(inner, module.down_proj[expert], expert, "down_proj")
                total.index_add_(0, tokens, output * shares[tokens, places, None])
            return total

        return forward


def _adding_lora(a: torch.Tensor, b: torch.Tensor, scale: float) -> Any:
    def add(_module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output + (inputs[0] @ a.T @ b.T) * scale

    return add


def _adding_reft(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Any:
    def add(_module: Any, _inputs: Any, output: Any) -> Any:
        stream = output[0] if isinstance(output, tuple) else output
        stream = stream + (stream @ a.T + bias) @ b
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    return add
