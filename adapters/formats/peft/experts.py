"""Read a PEFT LoRA on a mixture of experts: per expert, or per layer in peft's wrapper of a parameter.

transformers 5 keeps the experts of a layer in two parameters, gate_up_proj [E, 2 intermediate, hidden] and down_proj
[E, hidden, intermediate], and peft wraps these (`target_parameters`). A wrapper has the factors of all experts:

    A [E rank, in]     expert by expert, rank rows of each
    B [out, rank E]    of each rank, one column of every expert

If both parameters are wrapped, one wrapper is inside the other, in either order. So shapes decide which is which.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterUnsupported
from adapters.formats.peft.config import CONFIG_NAME, PeftConfig
from adapters.formats.peft.factors import Source
from adapters.formats.peft.names import Pair, Wrapper
from adapters.model.base_model import FUSED_MODULES, BaseModel
from adapters.model.normal_form import ExpertFactors

_PARAMETERS = {"gate_up_proj": FUSED_MODULES["gate_up_proj"], "down_proj": ("down_proj",)}
Experts = dict[tuple[int, int, str], ExpertFactors]


def read_expert_pair(pair: Pair, source: Source) -> ExpertFactors:
    """The factors of one projection of one expert."""
    size = source.base.expert_shape_of(pair.module)
    scale, dtype = source.scale_and_dtype(pair.key, pair.tensors, size, pair.parts)
    a, b = (source.weights.read_stored(pair.tensors[factor]) for factor in "AB")
    return ExpertFactors(a, b, scale, dtype)


def read_wrapped_experts(wrappers: Sequence[Wrapper], source: Source) -> Experts:
    """The factors in all wrappers, by layer, expert and module."""
    experts: Experts = {}
    found: set[tuple[int, str]] = set()
    for wrapper in wrappers:
        parameter = _parameter_of(wrapper, source)
        if (wrapper.layer, parameter) in found:
            raise AdapterMalformed(f"layer {wrapper.layer} has wrappers of {parameter} of its experts twice; keep one")
        found.add((wrapper.layer, parameter))
        for expert, module, factors in _read_wrapper(wrapper, parameter, source):
            experts[wrapper.layer, expert, module] = factors
    _check_named(source.config, {parameter for _, parameter in found}, source.base)
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


def _parameter_of(wrapper: Wrapper, source: Source) -> str:
    a, b = (source.weights.shape_of(wrapper.tensors[factor]) for factor in "AB")
    for parameter in _PARAMETERS:
        if source.base.expert_shape_of(parameter) == b[:1] + a[1:]:
            return parameter
    raise AdapterIncompatible(
        f"{wrapper.key} has a LoRA of shapes {list(a)} and {list(b)}, which fit no parameter of the experts of "
        f"{source.base}; it was made for another model"
    )


def _read_wrapper(wrapper: Wrapper, parameter: str, source: Source) -> Iterator[tuple[int, str, ExpertFactors]]:
    """(expert, module, factors); of gate_up_proj each part has the common A and its rows of B."""
    base, parts, key = source.base, _PARAMETERS[parameter], f"{wrapper.experts}.{parameter}"
    assert base.experts is not None
    (size_out, size_in), count = base.expert_shape_of(parameter), base.experts.count
    scale, dtype = source.scale_and_dtype(key, wrapper.tensors, (size_out, size_in), parts, count)
    a, b = (source.weights.read_stored(wrapper.tensors[factor]) for factor in "AB")
    a = a.reshape(count, -1, size_in)
    b = np.ascontiguousarray(b.reshape(size_out, -1, count).transpose(2, 0, 1))
    b.flags.writeable = False
    for expert in range(count):
        row = 0
        for part in parts:
            rows = base.expert_shape_of(part)[0]
            yield expert, part, ExpertFactors(a[expert], b[expert, row : row + rows], scale, dtype)
            row += rows
