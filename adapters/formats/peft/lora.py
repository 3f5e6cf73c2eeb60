"""Read a PEFT LoRA directory: adapter_config.json and adapter_model.safetensors.

The tensors say what the adapter changes, the configuration how strongly and at which positions. peft drops tensors that
its configuration does not name. Here they are an error, because an adapter must compute what its author trained or not
load at all.
"""

from __future__ import annotations

from collections.abc import Iterator

from adapters.errors import AdapterMalformed
from adapters.formats.checks import check_modules, common_dtype
from adapters.formats.folder import AdapterFolder
from adapters.formats.json_file import Fields
from adapters.formats.origin import name_warning
from adapters.formats.peft.config import CONFIG_NAME, PeftConfig, unknown_fields
from adapters.formats.peft.coverage import check_targets
from adapters.formats.peft.experts import Experts, read_expert_pair, read_wrapped_experts
from adapters.formats.peft.factors import checked_rank
from adapters.formats.peft.names import Pair, named_tensors
from adapters.formats.safetensors_file import SafetensorsFile, open_safetensors
from adapters.model.base_model import BaseModel
from adapters.model.normal_form import Adapter, FloatArray, LoraFactors, frozen_array

WEIGHTS_STEM = "adapter_model"


def read_peft_lora(folder: AdapterFolder, base: BaseModel) -> Adapter:
    """Read the adapter in normal form. Raises a subclass of AdapterError."""
    fields = Fields.read(folder, CONFIG_NAME)
    config = PeftConfig.parse(fields)
    with open_safetensors(folder, f"{WEIGHTS_STEM}.safetensors") as weights:
        named = named_tensors(weights.tensors, base)
        pairs = named.pairs + named.expert_pairs
        check_targets(config, pairs, base)
        lora: dict[tuple[int, str], LoraFactors] = {}
        for pair in named.pairs:
            for module, factors in _read_pair(pair, weights, config, base, folder):
                if (pair.layer, module) in lora:
                    raise AdapterMalformed(
                        f"layer {pair.layer} has a LoRA for {module} twice: by itself and inside a fused projection"
                    )
                lora[pair.layer, module] = factors
        experts: Experts = {}
        for pair in named.expert_pairs:
            if pair.expert is not None:
                of_expert = read_expert_pair(pair, weights, config, base, folder)
                experts[pair.layer, pair.expert, pair.module] = of_expert
        wrapped = read_wrapped_experts(named.wrappers, weights, config, base, folder)
        if twice := sorted(wrapped.keys() & experts.keys()):
            layer, expert, module = twice[0]
            raise AdapterMalformed(
                f"layer {layer} has a LoRA for {module} of expert {expert} twice: by itself and in a wrapper of all "
                "experts; keep one"
            )
        experts |= wrapped
    warnings = (
        *config.warnings,
        *unknown_fields(fields),
        *name_warning(CONFIG_NAME, fields.string("base_model_name_or_path"), base),
    )
    return Adapter(
        lora, {}, config.positions, base.fingerprint, weights.num_bytes, experts, warnings, config.trained_positions
    )


def _read_pair(
    pair: Pair, weights: SafetensorsFile, config: PeftConfig, base: BaseModel, folder: AdapterFolder
) -> Iterator[tuple[str, LoraFactors]]:
    """(module, factors) of one module, or of each part of a fused one."""
    rank = checked_rank(pair.key, pair.tensors, weights, config, base.shape_of(pair.module), base, folder)
    check_modules(pair.parts, folder)
    a_name, b_name = pair.tensors["A"], pair.tensors["B"]
    dtype = common_dtype(weights.dtype_of(a_name), weights.dtype_of(b_name))
    a, b, scale, row = weights.read(a_name), weights.read(b_name), config.scale_of(pair.key, rank), 0
    for part in pair.parts:
        rows = base.shape_of(part)[0]
        yield part, LoraFactors(a, _rows(b, row, row + rows), scale, dtype)
        row += rows


def _rows(array: FloatArray, begin: int, end: int) -> FloatArray:
    return array if (begin, end) == (0, array.shape[0]) else frozen_array(array[begin:end])
