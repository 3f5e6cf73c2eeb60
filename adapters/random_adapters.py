"""Random adapters of every kind as directories on disk, for tests and demonstrations. The same seed gives the same bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adapters.base_model import FUSED_MODULES, MODULES, BaseModel, name_of_module
from adapters.formats.safetensors_file import encode, write_safetensors

EncodedTensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def write_random_lora(
    directory: Path,
    base: BaseModel,
    seed: int,
    *,
    modules: Sequence[str] = MODULES,
    layers: Sequence[int] | None = None,
    rank: int = 8,
    alpha: float = 16,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    use_rslora: bool = False,
    target_modules: str | Sequence[str] | None = None,
    dtype: str = "float32",
    std: float = 0.3,
    zero: bool = False,
    key_format: str = "base_model.model.{module}.lora_{factor}.weight",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A PEFT LoRA. `modules` may have fused names; `layers` other than all become layers_to_transform.

    `std` is that of B's values; those of A make A x about as large as x. `zero` makes every B zero. `config` overrides fields
    of adapter_config.json. `rank_pattern` has module names (`q_proj`, `model.layers.0.mlp.up_proj`), no expressions.
    """
    generator = np.random.default_rng(seed)
    tensors: EncodedTensors = {}
    for layer in range(base.num_layers) if layers is None else layers:
        for module in modules:
            name = name_of_module(layer, module)
            size_out, size_in = base.shape_of(module)
            r = next((r for entry, r in (rank_pattern or {}).items() if f".{name}".endswith(f".{entry}")), rank)
            a = generator.normal(0, 1 / math.sqrt(size_in), (r, size_in))
            b = np.zeros((size_out, r)) if zero else generator.normal(0, std, (size_out, r))
            tensors[key_format.format(module=name, factor="A")] = encode(a, dtype)
            tensors[key_format.format(module=name, factor="B")] = encode(b, dtype)
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": target_modules or list(modules),
        "layers_to_transform": None if layers is None or isinstance(target_modules, str) else list(layers),
        "layers_pattern": None,
        "rank_pattern": dict(rank_pattern or {}),
        "alpha_pattern": dict(alpha_pattern or {}),
        "use_dora": False,
        "use_rslora": use_rslora,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**fields, **(config or {})}, indent=2))
    write_safetensors(directory / "adapter_model.safetensors", tensors, {"format": "pt"})
    return directory


def all_modules(fused: bool) -> tuple[str, ...]:
    """The seven projections, or with q, k, v and gate, up under their fused names."""
    return (*FUSED_MODULES, "o_proj", "down_proj") if fused else MODULES
