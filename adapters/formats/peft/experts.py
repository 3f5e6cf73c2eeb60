"""Read a PEFT LoRA on a mixture of experts: per expert, or per layer in peft's wrapper of a parameter.

transformers 5 keeps the experts of a layer in two parameters, gate_up_proj [E, 2 intermediate, hidden] and down_proj
[E, hidden, intermediate], and peft wraps these (`target_parameters`). A wrapper has the factors of all experts:

    A [E rank, in]     expert by expert, rank rows of each
    B [out, rank E]    of each rank, one column of every expert

If both parameters are wrapped, one wrapper is inside the other, in either order. So shapes decide which is which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterUnsupported
from adapters.formats.checks import check_modules, common_dtype
from adapters.formats.folder import AdapterFolder
from adapters.formats.peft.config import CONFIG_NAME, PeftConfig
from adapters.formats.peft.factors import checked_rank
from adapters.formats.peft.names import Pair, Wrapper
from adapters.formats.safetensors_file import SafetensorsFile
from adapters.model.base_model import FUSED_MODULES, BaseModel, name_of_experts
from adapters.model.normal_form import ExpertFactors

_PARAMETERS = {"gate_up_proj": FUSED_MODULES["gate_up_proj"], "down_proj": ("down_proj",)}
Experts = dict[tuple[int, int, str], ExpertFactors]


def read_expert_pair(
    pair: Pair, weights: SafetensorsFile, config: PeftConfig, base: BaseModel, folder: AdapterFolder
) -> ExpertFactors:
    """The factors of one projection of one expert."""
    a_name, b_name = pair.tensors["A"], pair.tensors["B"]
    rank = checked_rank(pair.key, pair.tensors, weights, config, base.expert_shape_of(pair.module), base, folder)
    check_modules(pair.parts, folder)
    dtype = common_dtype(weights.dtype_of(a_name), weights.dtype_of(b_name))
    return ExpertFactors(
        weights.read_stored(a_name), weights.read_stored(b_name), config.scale_of(pair.key, rank), dtype
    )


def read_wrapped_experts(
    wrappers: Sequence[Wrapper], weights: SafetensorsFile, config: PeftConfig, base: BaseModel, folder: AdapterFolder
) -> Experts:
    """The factors in all wrappers, by layer, expert and module."""
    experts: Experts = {}
    found: set[tuple[int, str]] = set()
    for wrapper in wrappers:
        parameter = _parameter_of(wrapper, weights, base)
        if (wrapper.layer, parameter) in found:
            raise AdapterMalformed(f"layer {wrapper.layer} has wrappers of {parameter} of its experts twice; keep one")
        found.add((wrapper.layer, parameter))
        for expert, module, factors in _read_wrapper(wrapper, parameter, weights, config, base, folder):
            experts[wrapper.layer, expert, module] = factors
    _check_named(config, {parameter for _, parameter in found}, base)
    return experts


def _check_named(config: PeftConfig, found: set[str], base: BaseModel) -> None:
    """Check that target_parameters and the wrappers name the same parameters."""
    named = {entry.rpartition(".")[2]: entry for entry in config.parameters}
    for name, entry in named.items():
        if name not in _PARAMETERS or base.experts is None:
            raise AdapterUnsupported(
                f"{CONFIG_NAME}: target_parameters names {entry[:80]!r}, which is not of the experts of {base}; of "
                "bare parameters mlp.experts.gate_up_proj and mlp.experts.down_proj are read, name others in "
                "target_modules"
            )
        if name not in found:
            raise AdapterMalformed(
                f"{CONFIG_NAME}: target_parameters names {entry} of the experts, but there are no tensors for it; the "
                "file is incomplete"
            )
    if strange := sorted(found - named.keys()):
        raise AdapterMalformed(
            f"there are tensors for {strange[0]} of experts, but {CONFIG_NAME} names "
            f"{' and '.join(sorted(named)) or 'nothing'} of its experts in target_parameters; peft would drop them, so "
            "correct the configuration"
        )


def _parameter_of(wrapper: Wrapper, weights: SafetensorsFile, base: BaseModel) -> str:
    a, b = (weights.shape_of(wrapper.tensors[factor]) for factor in ("A", "B"))
    for parameter in _PARAMETERS:
        if base.expert_shape_of(parameter) == b[:1] + a[1:]:
            return parameter
    raise AdapterIncompatible(
        f"{wrapper.key} has a LoRA of shapes {list(a)} and {list(b)}, which fit no parameter of the experts of {base}; "
        "it was made for another model"
    )


def _read_wrapper(
    wrapper: Wrapper,
    parameter: str,
    weights: SafetensorsFile,
    config: PeftConfig,
    base: BaseModel,
    folder: AdapterFolder,
) -> Iterator[tuple[int, str, ExpertFactors]]:
    """(expert, module, factors); of gate_up_proj each part has the common A and its rows of B."""
    assert base.experts is not None
    key, parts, count = f"{name_of_experts(wrapper.layer)}.{parameter}", _PARAMETERS[parameter], base.experts.count
    size_out, size_in = base.expert_shape_of(parameter)
    rank = checked_rank(key, wrapper.tensors, weights, config, (size_out, size_in), base, folder, count)
    check_modules(parts, folder)
    a_name, b_name, scale = wrapper.tensors["A"], wrapper.tensors["B"], config.scale_of(key, rank)
    dtype = common_dtype(weights.dtype_of(a_name), weights.dtype_of(b_name))
    a = weights.read_stored(a_name).reshape(count, rank, size_in)
    b = np.ascontiguousarray(weights.read_stored(b_name).reshape(size_out, rank, count).transpose(2, 0, 1))
    b.flags.writeable = False
    for expert in range(count):
        row = 0
        for part in parts:
            rows = base.expert_shape_of(part)[0]
            yield expert, part, ExpertFactors(a[expert], b[expert, row : row + rows], scale, dtype)
            row += rows
