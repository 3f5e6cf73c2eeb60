"""Read a PEFT LoRA directory: adapter_config.json and adapter_model.safetensors.

peft's own behaviour is the standard, with one difference: peft drops tensors that its configuration does not name. Here
they are an error, because an adapter must compute what its author trained or not load at all.
"""

from __future__ import annotations

from collections.abc import Iterator

from adapters.errors import AdapterMalformed, AdapterUnsupported
from adapters.formats.checks import check_modules, common_dtype
from adapters.formats.folder import AdapterFolder
from adapters.formats.json_file import Fields
from adapters.formats.origin import name_warning
from adapters.formats.peft.config import CONFIG_NAME, PeftConfig, unknown_fields
from adapters.formats.peft.coverage import check_targets
from adapters.formats.peft.experts import Experts, read_expert_pair, read_wrapped_experts
from adapters.formats.peft.factors import check_shapes
from adapters.formats.peft.names import Pair, named_tensors
from adapters.formats.weights import Weights, open_weights
from adapters.model.base_model import BaseModel
from adapters.model.normal_form import Adapter, FloatArray, LoraFactors, frozen_array

WEIGHTS_STEM = "adapter_model"


def read_peft_lora(folder: AdapterFolder, base: BaseModel) -> Adapter:
    """Read the adapter in normal form. Raises a subclass of AdapterError."""
    fields = Fields.read(folder, CONFIG_NAME)
    config = PeftConfig.parse(fields)
    _refuse_parameters(config, base)
    with open_weights(folder, WEIGHTS_STEM) as weights:
        named = named_tensors(weights, base)
        check_targets(config, named, base)
        numbers = config.ranks_and_scales(pair.key for pair in named.pairs + named.expert_pairs)
        lora: dict[tuple[int, str], LoraFactors] = {}
        for pair in named.pairs:
            for module, factors in _read_pair(pair, weights, *numbers[pair.key], base, folder):
                if (pair.layer, module) in lora:
                    raise AdapterMalformed(
                        f"layer {pair.layer} has a LoRA for {module} twice: by itself and inside a fused projection"
                    )
                lora[pair.layer, module] = factors
        experts: Experts = {}
        for pair in named.expert_pairs:
            if pair.expert is not None:
                of_expert = read_expert_pair(pair, weights, *numbers[pair.key], base, folder)
                experts[pair.layer, pair.expert, pair.module] = of_expert
        if named.wrappers or config.parameters:
            wrapped = read_wrapped_experts(named.wrappers, weights, config, base, folder)
            if twice := sorted(wrapped.keys() & experts.keys()):
                layer, expert, module = twice[0]
                raise AdapterMalformed(
                    f"layer {layer} has a LoRA for {module} of expert {expert} twice: by itself and in a wrapper of "
                    "all experts; keep one"
                )
            experts |= wrapped
    warnings = (
        *config.warnings,
        *unknown_fields(fields),
        *name_warning(CONFIG_NAME, fields.string("base_model_name_or_path"), base),
    )
    return Adapter(
        lora, {}, config.positions, base.fingerprint, folder.num_bytes, experts, warnings, config.trained_positions
    )


def _refuse_parameters(config: PeftConfig, base: BaseModel) -> None:
    if config.parameters and base.experts is None:
        raise AdapterUnsupported(
            f"{CONFIG_NAME}: target_parameters asks for LoRA on bare parameters, which is read for mixtures of experts "
            f"only, and {base} has none; name linear projections in target_modules"
        )


def _read_pair(
    pair: Pair, weights: Weights, rank: int, scale: float, base: BaseModel, folder: AdapterFolder
) -> Iterator[tuple[str, LoraFactors]]:
    """(module, factors) of one module, or of each part of a fused one."""
    a_name, b_name = pair.tensors["A"], pair.tensors["B"]
    check_shapes(pair.key, pair.tensors, weights, rank, base.shape_of(pair.module), base, folder)
    check_modules(pair.parts, folder)
    a_file, b_file = weights.files[a_name], weights.files[b_name]
    dtype = common_dtype(a_file.dtype_of(a_name), b_file.dtype_of(b_name))
    a, b, row = a_file.read(a_name), b_file.read(b_name), 0
    for part in pair.parts:
        rows = base.shape_of(part)[0]
        yield part, LoraFactors(a, _rows(b, row, row + rows), scale, dtype)
        row += rows


def _rows(array: FloatArray, begin: int, end: int) -> FloatArray:
    return array if (begin, end) == (0, array.shape[0]) else frozen_array(array[begin:end])
