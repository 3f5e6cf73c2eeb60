"""Write random adapters as directories. The same seed gives the same bytes."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adapters.formats.peft.config import CONFIG_NAME as PEFT_CONFIG
from adapters.formats.peft.lora import WEIGHTS_STEM as PEFT_WEIGHTS
from adapters.formats.prelude import CONFIG_NAME as PRELUDE_CONFIG
from adapters.formats.prelude import WEIGHTS_STEM as PRELUDE_WEIGHTS
from adapters.formats.safetensors_file import Encoded, encode, write_safetensors
from adapters.model.base_model import MODULES, BaseModel, name_of_module


def write_random_lora(
    directory: Path,
    base: BaseModel,
    seed: int,
    *,
    rank: int = 8,
    alpha: float = 16,
    dtype: str = "float32",
    positions: str = "prefill",
) -> Path:
    """Write a PEFT LoRA on every projection of every layer. A x is about as large as x, and s B A x is not small."""
    generator = np.random.default_rng(seed)
    tensors: dict[str, Encoded] = {}
    for layer in range(base.num_layers):
        for module in MODULES:
            size_out, size_in = base.shape_of(module)
            name = f"base_model.model.{name_of_module(layer, module)}"
            a = generator.normal(0, 1 / math.sqrt(size_in), (rank, size_in))
            tensors[f"{name}.lora_A.weight"] = encode(a, dtype)
            tensors[f"{name}.lora_B.weight"] = encode(generator.normal(0, 0.3, (size_out, rank)), dtype)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(MODULES),
        "prelude": {"positions": positions},
    }
    return _write(directory, PEFT_CONFIG, config, PEFT_WEIGHTS, tensors)


def write_random_direft(
    directory: Path, base: BaseModel, seed: int, *, rank: int, dtype: str = "float32", std: float = 0.5
) -> Path:
    """Write a DiReFT of every layer in Prelude's own layout. `std` is that of A h for an h of variance 1."""
    generator = np.random.default_rng(seed)
    tensors: dict[str, Encoded] = {}
    for layer in range(base.num_layers):
        a = generator.normal(0, std / math.sqrt(base.hidden), (rank, base.hidden))
        rotation = np.linalg.qr(generator.normal(size=(base.hidden, rank)))[0]
        tensors[f"reft.{layer}.A"] = encode(a, dtype)
        tensors[f"reft.{layer}.B"] = encode(rotation.T, dtype)
        tensors[f"reft.{layer}.bias"] = encode(generator.normal(0, std, rank), dtype)
    config = {
        "format": "prelude-adapter-1",
        "base_model": base.fingerprint,
        "positions": "prefill",
        "reft": {"kind": "direft"},
    }
    return _write(directory, PRELUDE_CONFIG, config, PRELUDE_WEIGHTS, tensors)


def _write(
    directory: Path, config_name: str, config: Mapping[str, Any], stem: str, tensors: Mapping[str, Encoded]
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / config_name).write_text(json.dumps(config, indent=2))
    write_safetensors(directory / f"{stem}.safetensors", tensors, {"format": "pt"})
    return directory
