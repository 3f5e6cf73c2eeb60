"""The directory of an adapter in training, as `prelude adapters import` takes it: peft's layout for LoRA, else ours."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adapters.formats.lineage import KEY as LINEAGE
from adapters.formats.peft.config import CONFIG_NAME as PEFT_CONFIG
from adapters.formats.peft.config import OUR_KEY
from adapters.formats.prelude import CONFIG_NAME as PRELUDE_CONFIG
from adapters.formats.prelude import WEIGHTS_STEM
from adapters.formats.safetensors_file import Encoded, encode, write_safetensors
from adapters.model.base_model import name_of_module
from training.trainable.adapter import TrainableAdapter


def write_adapter(
    adapter: TrainableAdapter, folder: Path, base_name: str, lineage: Mapping[str, Any] | None = None
) -> None:
    """Write its files into a folder, in float32. `base_name` is for people, `lineage` of a converted adapter.

    Raises OSError.
    """
    said = {"positions": adapter.positions} | ({} if lineage is None else {LINEAGE: lineage})
    if adapter.spec.kind == "lora":
        _write_peft(adapter, folder, base_name, said)
    else:
        _write_prelude(adapter, folder, said)


def _write_peft(adapter: TrainableAdapter, folder: Path, base_name: str, said: Mapping[str, Any]) -> None:
    spec, base = adapter.spec, adapter.base
    tensors: dict[str, Encoded] = {}
    for layer, module, factors in adapter.lora():
        name, values = f"base_model.model.{name_of_module(layer, module)}", factors.factors()
        tensors[f"{name}.lora_A.weight"] = encode(values.a, "float32")
        tensors[f"{name}.lora_B.weight"] = encode(values.b, "float32")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": list(spec.modules_of(base)),
        "layers_to_transform": None if spec.layers is None else list(spec.layers_of(base)),
        OUR_KEY: said,
    }
    _write_json(folder / PEFT_CONFIG, config)
    write_safetensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"})


def _write_prelude(adapter: TrainableAdapter, folder: Path, said: Mapping[str, Any]) -> None:
    spec = adapter.spec
    tensors: dict[str, Encoded] = {
        f"reft.{layer}.{name}": encode(np.ascontiguousarray(values), "float32")
        for layer, factors in adapter.reft()
        for name, values in factors.tensors().items()
    }
    config = {
        "format": "prelude-adapter-1",
        "base_model": adapter.base.fingerprint,
        **said,
        "reft": {"kind": spec.kind, "scale": spec.scale},
    }
    _write_json(folder / PRELUDE_CONFIG, config)
    write_safetensors(folder / f"{WEIGHTS_STEM}.safetensors", tensors)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))
