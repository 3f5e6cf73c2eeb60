"""Read a PEFT LoRA directory: adapter_config.json and adapter_model.safetensors.

The tensors say what the adapter changes, the configuration how strongly and at which positions. peft drops tensors that
its configuration does not name. Here they are an error, because an adapter must compute what its author trained or not
load at all.
"""

from collections.abc import Iterator

from adapters.errors import AdapterMalformed
from adapters.formats.folder import AdapterFolder
from adapters.formats.json_file import Fields
from adapters.formats.origin import name_warning
from adapters.formats.peft.config import CONFIG_NAME, PeftConfig, unknown_fields
from adapters.formats.peft.coverage import check_targets
from adapters.formats.peft.experts import Experts, read_expert_pair, read_wrapped_experts
from adapters.formats.peft.factors import Source
from adapters.formats.peft.names import Pair, named_tensors
from adapters.formats.safetensors_file import open_safetensors
from adapters.model.base_model import BaseModel
from adapters.model.normal_form import Adapter, LoraFactors, frozen_array

WEIGHTS_STEM = "adapter_model"


def read_peft_lora(folder: AdapterFolder, base: BaseModel) -> Adapter:
    """Read the adapter in normal form. Raises a subclass of AdapterError."""
    fields = Fields.read(folder, CONFIG_NAME)
    config = PeftConfig.parse(fields)
    with open_safetensors(folder, f"{WEIGHTS_STEM}.safetensors") as weights:
        named, source = named_tensors(weights.tensors, base), Source(weights, config, base, folder)
        pairs = named.pairs + named.expert_pairs
        check_targets(config, pairs, base)
        lora: dict[tuple[int, str], LoraFactors] = {}
        for pair in named.pairs:
            for module, factors in _read_pair(pair, source):
                if (pair.layer, module) in lora:
                    raise AdapterMalformed(
                        f"layer {pair.layer} has a LoRA for {module} twice: by itself and inside a fused projection"
                    )
                lora[pair.layer, module] = factors
        experts: Experts = {}
        for pair in named.expert_pairs:
            if pair.expert is not None:
                experts[pair.layer, pair.expert, pair.module] = read_expert_pair(pair, source)
        wrapped = read_wrapped_experts(named.wrappers, source)
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


def _read_pair(pair: Pair, source: Source) -> Iterator[tuple[str, LoraFactors]]:
    """(module, factors) of one module, or of each part of a fused one."""
    size = source.base.shape_of(pair.module)
    scale, dtype = source.scale_and_dtype(pair.key, pair.tensors, size, pair.parts)
    a, b = (source.weights.read(pair.tensors[factor]) for factor in "AB")
    row = 0
    for part in pair.parts:
        rows = source.base.shape_of(part)[0]
        yield part, LoraFactors(a, frozen_array(b[row : row + rows]), scale, dtype)
        row += rows
