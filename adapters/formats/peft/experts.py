"""Read a PEFT LoRA on a mixture of experts: per expert, or per layer in peft's wrapper of a parameter.

transformers 5 keeps the experts of a layer in two parameters, gate_up_proj [E, 2 intermediate, hidden] and down_proj
[E, hidden, intermediate], and peft wraps these (`target_parameters`). A wrapper has the factors of all experts:

    A [E rank, in]     expert by expert, rank rows of each
    B [out, rank E]    of each rank, one column of every expert

If both parameters are wrapped, one wrapper is inside the other: that of gate_up_proj, unless peft had wrapped it alone
in the same process before, which reverses the order. So shapes decide which is which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from adapters.errors import AdapterMalformed, AdapterUnsupported
from adapters.formats.checks import check_modules, common_dtype
from adapters.formats.folder import AdapterFolder
from adapters.formats.peft.config import CONFIG_NAME, PeftConfig
from adapters.formats.peft.factors import check_shapes
from adapters.formats.peft.names import ROUTER_REFUSED, Pair, Wrapper, router_names
from adapters.formats.peft.targets import endings
from adapters.formats.weights import Weights
from adapters.model.base_model import FUSED_MODULES, BaseModel, name_of_experts
from adapters.model.normal_form import ExpertFactors

_PARAMETERS = {"gate_up_proj": FUSED_MODULES["gate_up_proj"], "down_proj": ("down_proj",)}
Experts = dict[tuple[int, int, str], ExpertFactors]


def read_expert_pair(
    pair: Pair, weights: Weights, rank: int, scale: float, base: BaseModel, folder: AdapterFolder
) -> ExpertFactors:
    """The factors of one projection of one expert."""
    a_name, b_name = pair.tensors["A"], pair.tensors["B"]
    check_shapes(pair.key, pair.tensors, weights, rank, base.expert_shape_of(pair.module), base, folder)
    check_modules(pair.parts, folder)
    a_file, b_file = weights.files[a_name], weights.files[b_name]
    dtype = common_dtype(a_file.dtype_of(a_name), b_file.dtype_of(b_name))
    return ExpertFactors(a_file.read_stored(a_name), b_file.read_stored(b_name), scale, dtype)


def read_wrapped_experts(
    wrappers: list[Wrapper], weights: Weights, config: PeftConfig, base: BaseModel, folder: AdapterFolder
) -> Experts:
    """The factors in all wrappers, by layer, expert and module."""
    targeted = _targeted_parameters(config, base)
    experts: Experts = {}
    adapted: set[tuple[int, str]] = set()
    parameters = [_parameter_of(wrapper, targeted, weights, base) for wrapper in wrappers]
    numbers = config.ranks_and_scales(
        _key(wrapper.layer, name) for wrapper, name in zip(wrappers, parameters, strict=True)
    )
    for wrapper, parameter in zip(wrappers, parameters, strict=True):
        if (wrapper.layer, parameter) in adapted:
            raise AdapterMalformed(f"layer {wrapper.layer} has wrappers of {parameter} of its experts twice; keep one")
        adapted.add((wrapper.layer, parameter))
        rank, scale = numbers[_key(wrapper.layer, parameter)]
        for expert, module, factors in _read_wrapper(wrapper, parameter, weights, rank, scale, base, folder):
            experts[wrapper.layer, expert, module] = factors
    for parameter in sorted({parameter for own in targeted.values() for parameter in own}):
        if not any(own == parameter for _, own in adapted):
            raise AdapterMalformed(
                f"{CONFIG_NAME}: target_parameters names {parameter} of the experts, but there are no tensors for it; "
                "the file is incomplete"
            )
    return experts


def _targeted_parameters(config: PeftConfig, base: BaseModel) -> dict[int, tuple[str, ...]]:
    """The parameters of each layer's experts that target_parameters names, in the order in which peft wraps them."""
    used: set[str] = set()
    entries, targeted = frozenset(config.parameters), {}
    for name in router_names(base):
        if not entries.isdisjoint(endings(name)):
            raise AdapterUnsupported(f"{CONFIG_NAME}: target_parameters names {name}: {ROUTER_REFUSED}")
    for layer in base.experts.layers if base.experts else ():
        found = {parameter: entries.intersection(endings(_key(layer, parameter))) for parameter in _PARAMETERS}
        targeted[layer] = tuple(parameter for parameter in _PARAMETERS if found[parameter])
        used |= set().union(*found.values())
    if strange := sorted(entries - used):
        raise AdapterUnsupported(
            f"{CONFIG_NAME}: target_parameters names {strange[0][:80]!r}, which is not of the experts of {base}; of "
            "bare parameters mlp.experts.gate_up_proj and mlp.experts.down_proj are read, others name in target_modules"
        )
    return targeted


def _parameter_of(wrapper: Wrapper, targeted: Mapping[int, tuple[str, ...]], weights: Weights, base: BaseModel) -> str:
    own, a, b = targeted[wrapper.layer], weights.shape_of(wrapper.tensors["A"]), weights.shape_of(wrapper.tensors["B"])
    fitting = [parameter for parameter in _PARAMETERS if base.expert_shape_of(parameter) == (b[:1] + a[1:])]
    place = len(own) - (2 if wrapper.is_inner else 1)
    if place < 0 or not set(fitting) <= set(own):
        raise AdapterMalformed(
            f"there are tensors for {wrapper.key}{''.join(f' ({each})' for each in fitting)}, but {CONFIG_NAME} names "
            f"{' and '.join(own) or 'nothing'} of its experts in target_parameters; peft would drop them, so correct "
            "the configuration"
        )
    return fitting[0] if fitting else own[place]  # if neither fits, reading it reports the error


def _read_wrapper(
    wrapper: Wrapper,
    parameter: str,
    weights: Weights,
    rank: int,
    scale: float,
    base: BaseModel,
    folder: AdapterFolder,
) -> Iterator[tuple[int, str, ExpertFactors]]:
    """(expert, module, factors); of gate_up_proj each part has the common A and its rows of B."""
    assert base.experts is not None
    key, parts, count = _key(wrapper.layer, parameter), _PARAMETERS[parameter], base.experts.count
    size_out, size_in = base.expert_shape_of(parameter)
    check_shapes(key, wrapper.tensors, weights, rank, (size_out, size_in), base, folder, count)
    check_modules(parts, folder)
    a_name, b_name = wrapper.tensors["A"], wrapper.tensors["B"]
    a_file, b_file = weights.files[a_name], weights.files[b_name]
    dtype = common_dtype(a_file.dtype_of(a_name), b_file.dtype_of(b_name))
    a = a_file.read_stored(a_name).reshape(count, rank, size_in)
    b = np.ascontiguousarray(b_file.read_stored(b_name).reshape(size_out, rank, count).transpose(2, 0, 1))
    b.flags.writeable = False
    for expert in range(count):
        row = 0
        for part in parts:
            rows = base.expert_shape_of(part)[0]
            yield expert, part, ExpertFactors(a[expert], b[expert, row : row + rows], scale, dtype)
            row += rows


def _key(layer: int, parameter: str) -> str:
    """peft's name of a parameter."""
    return f"{name_of_experts(layer)}.{parameter}"
