"""Write random adapters of every kind and layout as directories. The same seed gives the same bytes."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adapters.formats.peft.names import expert_key
from adapters.formats.safetensors_file import Encoded, encode, write_safetensors
from adapters.model.base_model import FUSED_MODULES, MLP_MODULES, MODULES, BaseModel, Experts, name_of_module

EncodedTensors = dict[str, Encoded]
ALL_FUSED = (*FUSED_MODULES, "o_proj", "down_proj")  # the seven projections, with fused names where there are
KEY_FORMAT = "base_model.model.{module}.lora_{factor}.weight"


def write_random_lora(
    directory: Path,
    base: BaseModel,
    seed: int,
    *,
    modules: Sequence[str] = MODULES,
    layers: Sequence[int] | None = None,
    target_modules: str | Sequence[str] | None = None,
    **options: Any,
) -> Path:
    """Write a PEFT LoRA. `modules` may be fused ones; `layers` other than all become layers_to_transform.

    The other options are those of `_write_peft`.
    """
    names = [
        (name_of_module(layer, module, base.layers_name), base.shape_of(module))
        for layer in (range(base.num_layers) if layers is None else layers)
        for module in modules
    ]
    fields = {
        "target_modules": target_modules or list(modules),
        "layers_to_transform": None if layers is None or isinstance(target_modules, str) else list(layers),
    }
    return _write_peft(directory, base, seed, names, fields, **options)


def write_random_expert_lora(
    directory: Path,
    base: BaseModel,
    seed: int,
    *,
    modules: Sequence[str] = MLP_MODULES,
    layers: Sequence[int] | None = None,
    experts: Sequence[int] | None = None,
    attention: Sequence[str] = (),
    target_modules: str | Sequence[str] | None = None,
    **options: Any,
) -> Path:
    """Write a PEFT LoRA on single experts, as transformers 4 and peft write it, by default of rank 4.

    By default it is on all experts of all layers that have any; `attention` adds projections in every layer. The other
    options are those of `_write_peft`; patterns have names as in the file (`experts.3.w1` for Mixtral).
    """
    sparse = base.experts or Experts(0, 0, ())
    names = [
        (expert_key(base, layer, expert, module), base.expert_shape_of(module))
        for layer in (sparse.layers if layers is None else layers)
        for expert in (range(sparse.count) if experts is None else experts)
        for module in modules
    ]
    names += [
        (name_of_module(layer, module, base.layers_name), base.shape_of(module))
        for layer in range(base.num_layers)
        for module in attention
    ]
    fields = {"target_modules": target_modules or sorted({name.rpartition(".")[2] for name, _ in names})}
    return _write_peft(directory, base, seed, names, fields, **{"rank": 4, "alpha": 8, **options})


def _write_peft(
    directory: Path,
    base: BaseModel,
    seed: int,
    names: Sequence[tuple[str, tuple[int, int]]],
    fields: Mapping[str, Any],
    *,
    rank: int = 8,
    alpha: float = 16,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    use_rslora: bool = False,
    dtype: str = "float32",
    std: float = 0.3,
    zero: bool = False,
    key_format: str = KEY_FORMAT,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """`names`: of the modules, with their sizes (out, in). `fields`: of adapter_config.json, and `config` over them.

    `std` is that of B's values; those of A make A x about as large as x. `zero` makes every B zero. `rank_pattern` has
    module names (`q_proj`, `layers.0.mlp.up_proj`), no expressions.
    """
    generator = np.random.default_rng(seed)
    tensors: EncodedTensors = {}
    for name, (size_out, size_in) in names:
        ranks = (own for entry, own in (rank_pattern or {}).items() if f".{name}".endswith(f".{entry}"))
        r = next(ranks, rank)
        a = generator.normal(0, 1 / math.sqrt(size_in), (r, size_in))
        b = generator.normal(0, std * (not zero), (size_out, r))
        tensors[key_format.format(module=name, factor="A")] = encode(a, dtype)
        tensors[key_format.format(module=name, factor="B")] = encode(b, dtype)
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": rank,
        "bias": "none",
        "prelude": {"positions": "prefill"},
        "lora_alpha": alpha,
        "rank_pattern": dict(rank_pattern or {}),
        "alpha_pattern": dict(alpha_pattern or {}),
        "use_rslora": use_rslora,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**written, **fields, **(config or {})}))
    write_safetensors(directory / "adapter_model.safetensors", tensors, {"format": "pt"})
    return directory


def write_random_mixed(
    directory: Path, base: BaseModel, seed: int, *, modules: Sequence[str] = ("q_proj", "down_proj"), **options: Any
) -> Path:
    """Write LoRA and DiReFT in one adapter, in Prelude's own layout. The other options are those of ReFT."""
    return write_random_reft(directory, base, seed, lora_on=modules, **options)


def write_random_reft(
    directory: Path,
    base: BaseModel,
    seed: int,
    *,
    kind: str = "direft",
    layers: Sequence[int] | None = None,
    rank: int = 4,
    scale: float | None = None,
    positions: str = "prefill",
    dtype: str = "float32",
    std: float = 0.5,
    zero: bool = False,
    lora_on: Sequence[str] = (),
) -> Path:
    """Write a ReFT in Prelude's own layout, on all layers by default; with a LoRA of the same rank on `lora_on`.

    `kind` is direft or loreft. `std` is that of W h for an h whose values have variance 1. `zero`: R is zero.
    """
    generator = np.random.default_rng(seed)
    tensors: EncodedTensors = {}
    for layer in range(base.num_layers) if layers is None else layers:
        for module in lora_on:
            size_out, size_in = base.shape_of(module)
            name = f"lora.{layer}.{module}"
            tensors[f"{name}.A"] = encode(generator.normal(0, 1 / math.sqrt(size_in), (rank, size_in)), dtype)
            tensors[f"{name}.B"] = encode(generator.normal(0, 0.3, (size_out, rank)), dtype)
        rotation = np.linalg.qr(generator.normal(size=(base.hidden, rank)))[0].T  # its rows are orthonormal
        source = generator.normal(0, std / math.sqrt(base.hidden), (rank, base.hidden))
        names = ("W", "R", "bias") if kind == "loreft" else ("A", "B", "bias")
        parts = (source, rotation * (not zero), generator.normal(0, std, rank))
        for name, array in zip(names, parts, strict=True):
            tensors[f"reft.{layer}.{name}"] = encode(array, dtype)
    header = {
        "format": "prelude-adapter-1",
        "base_model": base.fingerprint,
        "positions": positions,
        "reft": {"kind": kind} if scale is None else {"kind": kind, "scale": scale},
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "adapter.safetensors", tensors)
    (directory / "prelude_adapter.json").write_text(json.dumps(header | ({"lora": {"scale": 2.0}} if lora_on else {})))
    return directory
