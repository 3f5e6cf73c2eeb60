"""Bodies of the hooks that size SGLang's adapter slots, and complement them before it sizes the KV cache."""

import os
from collections.abc import Mapping

from engine.hooks.packed import make_packed_loader
from engine.hooks.reft import add_reft_to_layers
from engine.hooks.settings import ResolvedSettings, check_adapters, check_experts

EXPERT_RANK_VARIABLE = "PRELUDE_ENGINE_EXPERT_RANK"  # the largest of LoRA on experts; 0 or unset: there is none


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
    check_adapters(settings, manager.lora_backend.name, os.environ)
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
    check_experts(settings, layers)
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
