"""Checks that the pinned engine serves a base model, and fits the adapter slots to it."""

from dataclasses import replace

from adapters.model.base_model import MLP_MODULES, BaseModel
from engine.arguments import EngineSpec
from engine.errors import BaseModelNotRun
from engine.pin import SGLANG_VERSION

_EXPERTS_IN_EVERY_LAYER = ("Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration")
_ATTENTION = "--attention-backend"
_CPU_ROWS = 32  # to a multiple of which SGLang pads a rank's intermediate rows


def fitted_to(spec: EngineSpec, base: BaseModel) -> EngineSpec:
    """The spec with the target modules that the engine adapts in this base model.

    In a mixture of experts these are attention's projections and, where slots have room for LoRA on experts, all three
    of each expert, which SGLang adapts together only. Raises BaseModelNotRun if the engine would not run the model as
    its weights define it, or if no target module remains.
    """
    if (
        base.architecture in _EXPERTS_IN_EVERY_LAYER
        and len(base.experts.layers if base.experts else ()) < base.num_layers
    ):
        raise BaseModelNotRun(
            f"{base.name or base} has layers without experts (mlp_only_layers, decoder_sparse_step); SGLang "
            f"{SGLANG_VERSION} gives every layer of {base.architecture} experts, with weights that are not in the "
            "model: serve a model with experts in every layer"
        )
    if base.family.has_sinks and spec.device == "cpu" and _ATTENTION not in spec.extra_arguments:
        raise BaseModelNotRun(
            f"device is cpu, where SGLang's attention (torch_native) has no sinks, and {base} has: serve it on GPUs"
        )
    if base.has_mxfp4 and (spec.device, spec.dtype) != ("cuda", "bfloat16"):
        raise BaseModelNotRun(
            f"{base.name or base} has weights in MXFP4, with which engines compute on GPUs in bfloat16 only, and they "
            f"are on {spec.device} in {spec.dtype}: set device and model.dtype, or serve a checkpoint without "
            "quantization_config"
        )
    check_tensor_parallel(spec.tensor_parallel, base)
    spec = replace(spec, model_overrides=_model_overrides(base))
    if spec.adapters is None:
        return spec
    _check_padding(spec, base)
    modules = base.slot_modules(spec.adapters.target_modules)
    expert_rank = spec.adapters.max_expert_rank if base.adapted_experts is not None else 0
    if expert_rank:
        modules += MLP_MODULES
    if not modules:
        raise BaseModelNotRun(
            f"adapter_limits.target_modules names {', '.join(spec.adapters.target_modules)}, of which engines of "
            f"{base} adapt none; name a projection of attention, such as q_proj"
        )
    return replace(spec, adapters=replace(spec.adapters, target_modules=modules, max_expert_rank=expert_rank))


def _model_overrides(base: BaseModel) -> str | None:
    if base.is_multimodal:
        # As checkpoints without a tower say. SGLang's option of that name excludes prefill and decode engines. Gemma's
        # tower it loads nevertheless.
        return '{"language_model_only": true}'
    # SGLang gives attention and router the dtype of config.json, and all else that of the engine.
    return '{"dtype": null}' if base.architecture == "GptOssForCausalLM" else None


def _check_padding(spec: EngineSpec, base: BaseModel) -> None:
    """Raise BaseModelNotRun where SGLang pads a CPU rank's share, whose rows are then not those of a LoRA's B."""
    size = spec.tensor_parallel
    if spec.device != "cpu" or size == 1:
        return
    has_adapted_mlp = base.experts is None
    if base.kv_heads % size or (has_adapted_mlp and base.intermediate % (_CPU_ROWS * size)):
        raise BaseModelNotRun(
            f"tensor_parallel is {size} on CPUs, where SGLang pads the shares of {base}, and LoRA on them "
            f"would be wrong; use a size that divides the KV heads and, times {_CPU_ROWS}, the intermediate rows"
        )


def check_tensor_parallel(size: int, base: BaseModel) -> None:
    """Raise BaseModelNotRun unless every rank gets an equal share of the model. SGLang only fails an assertion."""
    if base.kv_heads % size and size % base.kv_heads:
        raise BaseModelNotRun(
            f"tensor_parallel is {size}, and {base} has {base.kv_heads} KV heads: use a size that divides them, or a "
            "multiple of them"
        )
    widths = {"attention heads": base.heads}
    if base.experts is not None:
        widths["intermediate rows of each expert"] = base.experts.intermediate
    if base.experts is None or len(base.experts.layers) < base.num_layers:
        widths["intermediate rows"] = base.intermediate
    for what, width in widths.items():
        if width % size:
            raise BaseModelNotRun(f"tensor_parallel is {size}, which does not divide the {width} {what} of {base}")
