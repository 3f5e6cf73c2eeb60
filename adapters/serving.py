"""Writes an adapter as the PEFT directory that SGLang 0.5.17 loads correctly.

SGLang takes one rank and one scale per adapter, stacks q, k and v into one buffer and gate and up into another
(`LoRAAdapter._normalize_weights`), and cannot build a stack of which a part is missing: q without k or v is a KeyError,
and k, v or up without their first sibling stay unstacked and are mistaken for the whole. So every module is padded to
the adapter's largest rank, the scale is folded into B so that lora_alpha / r is exactly 1, and missing siblings are
written as zeros.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np

from adapters.base_model import FUSED_MODULES, MODULES, BaseModel, name_of_module
from adapters.errors import AdapterIncompatible
from adapters.formats.peft_config import CONFIG_NAME, OUR_KEY
from adapters.formats.peft_lora import WEIGHTS_STEM
from adapters.formats.safetensors_file import encode, write_safetensors
from adapters.manifest import revision_id_of
from adapters.normal_form import Adapter, LoraFactors, ReftFactors

EngineDtype = Literal["float32", "bfloat16", "float16"]
# Of the tensors `prelude.reft.<layer>.{a,b,bias}`: A [r, d], scaled B [r, d], bias [r]. SGLang has no name for them.
REFT_PREFIX = "prelude.reft."
_LARGEST = {"float32": 3.4028234e38, "bfloat16": 3.3895313e38, "float16": 65504.0}


def write_for_engine(adapter: Adapter, base: BaseModel, dtype: EngineDtype, directory: Path) -> None:
    """Makes `directory` hold the adapter for SGLang, at once or not at all.

    A directory that already holds the same revision in the same dtype is left as it is. Raises AdapterIncompatible
    where a value does not fit the dtype or the adapter is for another base model.
    """
    if adapter.base_fingerprint != base.fingerprint:
        raise AdapterIncompatible(
            f"the adapter was read for the base model {adapter.base_fingerprint}, this one is {base.fingerprint}"
        )
    mark = serving_mark(revision_id_of(adapter), dtype, adapter.positions)
    if _holds(directory, mark):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        complete = temporary / "complete"
        complete.mkdir()
        _write(adapter, base, dtype, mark, complete)
        if directory.exists():  # another adapter's, or broken: set it aside, since a rename cannot replace it
            directory.rename(temporary / "replaced")
        try:
            complete.rename(directory)
        except OSError:
            if not _holds(directory, mark):  # else somebody else wrote the same one meanwhile
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def engine_modules(modules: set[str]) -> tuple[str, ...]:
    """The modules and the siblings that SGLang stacks with them, in the model's order."""
    needed = set(modules)
    for parts in FUSED_MODULES.values():
        if needed & set(parts):
            needed |= set(parts)
    return tuple(module for module in MODULES if module in needed)


def _write(adapter: Adapter, base: BaseModel, dtype: EngineDtype, mark: dict[str, str], directory: Path) -> None:
    rank = adapter.max_rank
    layers: dict[int, set[str]] = {}
    for layer, module in adapter.lora:
        layers.setdefault(layer, set()).add(module)
    tensors = {}
    for layer, modules in layers.items():
        for module in engine_modules(modules):
            key = f"base_model.model.{name_of_module(layer, module)}"
            a, b = _padded(adapter.lora.get((layer, module)), base.shape_of(module), rank)
            check_fits(f"{key}: the A", a, dtype)
            check_fits(f"{key}: the scaled B", b, dtype)
            tensors[f"{key}.lora_A.weight"] = encode(a, dtype)
            tensors[f"{key}.lora_B.weight"] = encode(b, dtype)
    for layer, reft in adapter.reft.items():
        for part, array in (("a", reft.a), ("b", scaled_reft_b(reft)), ("bias", reft.bias)):
            key = f"{REFT_PREFIX}{layer}.{part}"
            check_fits(f"{key}: it", array, dtype)
            tensors[key] = encode(array, dtype)
    write_safetensors(directory / f"{WEIGHTS_STEM}.safetensors", tensors, {"format": "pt"})
    write_engine_config(directory, base, rank, {module for _, module in adapter.lora}, mark)


def serving_mark(revision_id: str, dtype: EngineDtype, positions: str) -> dict[str, str]:
    """What a serving directory says of itself, under OUR_KEY; the engine reads the positions from it."""
    return {"revision_id": revision_id, "dtype": dtype, "positions": positions}


def write_engine_config(directory: Path, base: BaseModel, rank: int, modules: set[str], mark: dict[str, str]) -> None:
    """Write the adapter_config.json of a serving directory: one rank, a scale of 1, the modules with their siblings."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(engine_modules(modules)),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
        OUR_KEY: mark,
    }
    with (directory / CONFIG_NAME).open("w") as file:
        json.dump(config, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _padded(factors: LoraFactors | None, shape: tuple[int, int], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A [rank, in] and s B [out, rank]; zeros below the factors' own rank, and for no factors at all."""
    size_out, size_in = shape
    a, b = np.zeros((rank, size_in), np.float32), np.zeros((size_out, rank), np.float32)
    if factors is not None:
        a[: factors.rank], b[:, : factors.rank] = factors.a, scaled_lora_b(factors)
    return a, b


def scaled_lora_b(factors: LoraFactors) -> np.ndarray:
    """s B [out, rank] as float32; infinite where that is too small for it."""
    with np.errstate(over="ignore"):
        scaled = (factors.b.astype(np.float64) * factors.scale).astype(np.float32)
    return scaled + np.float32(0)  # a negative scale makes -0.0 of 0.0


def scaled_reft_b(factors: ReftFactors) -> np.ndarray:
    """s B [rank, hidden] as float32; infinite where that is too small for it."""
    with np.errstate(over="ignore"):
        return factors.b * np.float32(factors.scale) + np.float32(0)


def check_fits(what: str, values: np.ndarray, dtype: EngineDtype) -> None:
    """Raises AdapterIncompatible where a value is too large for the dtype."""
    if not (largest := float(np.abs(values).max(initial=0))) <= _LARGEST[dtype]:
        raise AdapterIncompatible(
            f"{what} has a value of {largest:.3g}, too large for {dtype}; serve the model in a wider dtype or train "
            "with a smaller lora_alpha"
        )


def _holds(directory: Path, mark: dict[str, str]) -> bool:
    """True where the directory holds what `mark` names; its mark is enough, since it appears whole or not at all."""
    try:
        return json.loads((directory / CONFIG_NAME).read_bytes()).get(OUR_KEY) == mark
    except (OSError, ValueError, AttributeError):
        return False
