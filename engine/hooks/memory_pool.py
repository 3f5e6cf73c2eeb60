"""Bodies of the hooks that size SGLang's adapter slots, and complement them before it sizes the KV cache."""

from __future__ import annotations

import os
from collections.abc import Mapping

from engine.hooks.packed import make_packed_loader
from engine.hooks.reft import add_reft_to_layers
from engine.hooks.settings import ResolvedSettings

EXPERT_RANK_VARIABLE = "PRELUDE_ENGINE_EXPERT_RANK"  # the largest of LoRA on experts; 0 or unset: there is none
_SPREAD = "a rank would have other tokens than the batch's segments"
_LATE_SUM = "ranks sum a layer's output in the next layer, after ReFT has read it"
# Options under which the hooks would read stale or foreign metadata.
_UNSUPPORTED = {
    "enable_lora_overlap_loading": "slots are filled on a stream of their own already, for the next batch",
    "enable_two_batch_overlap": "half of a batch has other tokens than the batch's segments",
    "flashinfer_allreduce_fusion_backend": _LATE_SUM,
    "enable_aiter_allreduce_fusion": _LATE_SUM,
    "moe_a2a_backend": _SPREAD,
    "moe_dense_tp_size": _SPREAD,
    "enable_attn_tp_input_scattered": _SPREAD,
    "enable_layernorm_sp": _SPREAD,
    "enable_dense_mlp_attn_tp": _SPREAD,
    "enable_cp_tp_group_sharing": _SPREAD,
    "enable_nvidia_megakernel": "it computes layers past the hooks",
    "prefill_decode_interval": "a request that is retracted before its first step would leave base KV in a prefix",
    "enable_pdmux": "prompts and answers run at the same time, and the hooks keep the state of one batch",
    "max_loaded_loras": "the engine would evict adapters on its own, and the agent would not know",
    "speculative_algorithm": "the hooks do not tell verified draft tokens from prompt and answer",
}

# Sizes that must be 1.
_UNSUPPORTED_ABOVE_1 = {
    "dp_size": "an adapter would be loaded where another scheduler's reply says so",
    "attn_dp_size": "batches without tokens bypass the hooks",
    "pp_size": "adapters have not been run where a rank has some of the layers",
    "attn_cp_size": _SPREAD,
    "moe_dp_size": _SPREAD,
    "dwdp_size": _SPREAD,
    "tokenizer_worker_num": "each of these processes would know only its own requests, and an adapter could be "
    "unloaded under another one's",
}

# The same for LoRA on experts.
_UNSUPPORTED_WITH_EXPERTS = {
    "experts_shared_outer_loras": "packed adapters have factors of their own for each expert",
    "lora_use_virtual_experts": "its kernels have not been run with packed adapters",
    "enable_eplb": "slots have experts in the model's order",
    "init_expert_location": "slots have experts in the model's order",
    "enable_fused_moe_sum_all_reduce": "experts' outputs would be summed before LoRA is added to them",
}
_UNSUPPORTED_ABOVE_1_WITH_EXPERTS = {"ep_size": "every rank has all experts in its slots"}


def _refuse(what: str, settings, unsupported: dict[str, str], above_1: dict[str, str]) -> None:
    for name, why in (unsupported | above_1).items():
        unset = (None, False, "none", "trivial") if name in unsupported else (None, 1)
        if getattr(settings, name) not in unset:
            option = f"--{name.replace('_', '-')}{' above 1' if name in above_1 else ''}"
            raise ValueError(f"{option} cannot be used with {what}: {why}; remove it from extra_arguments")


def check_supported(settings, backend_name: str, environment: Mapping[str, str]) -> None:
    """Raise ValueError for settings under which adapters would give wrong results."""
    _refuse("adapters", settings, _UNSUPPORTED, _UNSUPPORTED_ABOVE_1)
    if backend_name not in ("csgmv", "torch_native"):
        raise ValueError(f"--lora-backend {backend_name} is not supported; use csgmv on GPU, torch_native on a CPU")
    if environment.get("SGLANG_EXPERIMENTAL_LORA_OPTI", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        raise ValueError("SGLANG_EXPERIMENTAL_LORA_OPTI reads slots beyond an adapter's rank; unset it")


def check_experts_supported(settings, layers) -> None:
    """Raise ValueError for settings under which LoRA on experts would be wrong or left out. `layers`: SGLang's."""
    _refuse("LoRA on experts", settings, _UNSUPPORTED_WITH_EXPERTS, _UNSUPPORTED_ABOVE_1_WITH_EXPERTS)
    if any(getattr(layer.base_layer, "use_intel_amx_backend", False) for layer in layers):
        raise ValueError("SGLang runs experts in its AMX kernel here, which applies no LoRA")
    others = [layer._lora_runner_backend for layer in layers if not layer._lora_runner_backend.is_triton()]
    if settings.device != "cpu" and others:
        raise ValueError(
            f"SGLang runs experts with {others[0].value} here, and LoRA on experts has been run with triton only; add "
            "--moe-runner-backend triton to extra_arguments"
        )


def room_for_experts(original, pool, base_model):
    """Make the slots. Experts have a largest rank of their own: each rank costs them gigabytes."""

    def with_rank_of_experts(shape):
        def shape_of(module_name, base_model, max_lora_dim, layer_idx):
            if pool.is_moe_module(module_name):
                max_lora_dim = expert_rank(os.environ)
            return shape(module_name, base_model, max_lora_dim, layer_idx)

        return shape_of

    shapes = ("get_lora_A_shape", "get_lora_B_shape")
    for name in shapes:
        setattr(pool, name, with_rank_of_experts(getattr(pool, name)))
    try:
        return original(pool, base_model)
    finally:
        for name in shapes:
            delattr(pool, name)


def expert_rank(environment: Mapping[str, str]) -> int:
    """The largest rank of LoRA on experts that the slots have room for."""
    return int(environment.get(EXPERT_RANK_VARIABLE) or 0)


def complement_memory_pool(result, manager):
    """Check the settings, then attach the packed loader, the ReFT pool and what experts need to the memory pool."""
    settings = ResolvedSettings()
    check_supported(settings, manager.lora_backend.name, os.environ)
    _prepare_experts(manager, settings)
    # Decode runs without LoRA's kernels, unless an adapter acts everywhere: SGLang captures each graph twice then.
    # Not where slots have room for LoRA on experts, whose kernels no decode graph has.
    manager.lora_backend.skip_inactive_dense_lora = getattr(manager.memory_pool, "prelude_experts", None) is None
    make_packed_loader(manager)
    add_reft_to_layers(manager)
    return result


def _prepare_experts(manager, settings) -> None:
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    from engine.adapter_slots.experts import AdaptedTokens

    layers = [module for module in manager.base_model.modules() if isinstance(module, FusedMoEWithLoRA)]
    if not layers:
        return
    if not expert_rank(os.environ):
        raise ValueError("--lora-target-modules names projections of experts; use adapter_limits.max_expert_rank")
    check_experts_supported(settings, layers)
    tokens = AdaptedTokens()
    manager.memory_pool.prelude_experts = manager.lora_backend.prelude_experts = tokens
    # A graph would repeat what the batch that it was captured with did: without LoRA on experts.
    manager.lora_backend.supports_prefill_cuda_graph = False
    if settings.device == "cpu":
        manager.lora_backend.is_moe_lora = False  # then it prepares nothing for SGLang's kernels, which do not run
    else:
        _compile_alignment()


def _compile_alignment() -> None:
    """Compile SGLang's kernel that sorts tokens by expert, now and not while the first request for it waits."""
    import torch
    from sglang.kernels.ops.lora.moe import moe_lora_align

    moe_lora_align._jit_moe_align_module(torch.int32)
