"""The serving form of an adapter, read and applied without any of Prelude's readers. Needs torch.

It is one half of what the self-check compares, so it must share no code with `adapters.serving` and `adapters.formats`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LORA_KEY = re.compile(r"base_model\.model\.(model\.layers\.\d+\.\w+\.\w+)\.lora_([AB])\.weight")
_REFT_KEY = re.compile(r"prelude\.reft\.(\d+)\.(a|b|bias)")


@dataclass(frozen=True, slots=True)
class ServingForm:
    """What `write_for_engine` wrote, read without any of Prelude's readers. Tensors keep the dtype of the file."""

    lora: Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # module's dotted name -> A [r, in], B [out, r]
    reft: Mapping[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # layer -> A, B [r, hidden], bias [r]
    scale: float
    num_bytes: int

    @classmethod
    def read(cls, directory: Path) -> ServingForm:
        """Reads a directory. Raises ValueError for a tensor that this check does not know."""
        from safetensors.torch import load_file

        config = json.loads((directory / "adapter_config.json").read_text())
        lora: dict[str, dict[str, torch.Tensor]] = {}
        reft: dict[int, dict[str, torch.Tensor]] = {}
        num_bytes = 0
        for path in sorted(directory.glob("*.safetensors")):
            for key, tensor in load_file(path).items():
                num_bytes += tensor.numel() * tensor.element_size()
                if match := _LORA_KEY.fullmatch(key):
                    lora.setdefault(match[1], {})[match[2]] = tensor
                elif match := _REFT_KEY.fullmatch(key):
                    reft.setdefault(int(match[1]), {})[match[2]] = tensor
                else:
                    raise ValueError(f"the serving form has a tensor {key!r}, which the self-check cannot apply")
        return cls(
            lora={name: (parts["A"], parts["B"]) for name, parts in lora.items()},
            reft={layer: (parts["a"], parts["b"], parts["bias"]) for layer, parts in reft.items()},
            scale=config["lora_alpha"] / config["r"],
            num_bytes=num_bytes,
        )

    @contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """Inside, every token that the model reads is adapted by this form, in float32."""
        modules = dict(model.named_modules())
        hooks = []
        try:
            for name, (a, b) in self.lora.items():
                hooks.append(modules[name].register_forward_hook(_adding_lora(a.float(), b.float(), self.scale)))
            for layer, (a, b, bias) in self.reft.items():
                hook = _adding_reft(a.float(), b.float(), bias.float())
                hooks.append(modules[f"model.layers.{layer}"].register_forward_hook(hook))
            yield
        finally:
            for hook in hooks:
                hook.remove()


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
