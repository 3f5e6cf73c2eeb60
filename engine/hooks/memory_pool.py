"""Bodies of the hooks that size SGLang's adapter slots, and complement them before it sizes the KV cache."""

from __future__ import annotations

import os
from collections.abc import Mapping

from engine.hooks.packed import make_packed_loader
from engine.hooks.reft import add_reft_to_layers

EXPERT_RANK_VARIABLE = "PRELUDE_ENGINE_EXPERT_RANK"  # the largest of LoRA on experts; 0 or unset: there is none
_SPREAD = "a rank would have other tokens than the batch's segments"
_LATE_SUM = "ranks sum a layer's output in the next layer, after ReFT has read it"
# Options under which the hooks would read stale or foreign metadata.
_UNSUPPORTED = {
    "enable_lora_overlap_loading": "slots are filled on a stream of their own already, for the next batch",
    "enable_dp_attention": "batches without tokens bypass the hooks",
    "enable_two_batch_overlap": "half of a batch has other tokens than the batch's segments",
    "flashinfer_allreduce_fusion_backend": _LATE_SUM,
    "enable_aiter_allreduce_fusion": _LATE_SUM,
    "moe_a2a_backend": _SPREAD,
    "moe_dense_tp_size": _SPREAD,
    "enable_attn_tp_input_scattered": _SPREAD,
    "enable_pdmux": "prompts and answers run at the same time, and the hooks keep the state of one batch",
    "max_loaded_loras": "the engine would evict adapters on its own, and the agent would not know",
    "speculative_algorithm": "the hooks do not tell verified draft tokens from prompt and answer",
}

# Sizes that must be 1.
_UNSUPPORTED_ABOVE_1 = {
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


def _refuse(what: str, server_args, unsupported: dict[str, str], above_1: dict[str, str]) -> None:
    for name, why in (unsupported | above_1).items():
        unset = (None, False, "none", "trivial") if name in unsupported else (None, 1)
        if getattr(server_args, name, None) not in unset:
            option = f"--{name.replace('_', '-')}{' above 1' if name in above_1 else ''}"
            raise ValueError(f"{option} cannot be used with {what}: {why}; remove it from extra_arguments")


def check_supported(server_args, backend_name: str, environment: Mapping[str, str]) -> None:
    """Raise ValueError for settings under which adapters would give wrong results."""
    _refuse("adapters", server_args, _UNSUPPORTED, _UNSUPPORTED_ABOVE_1)
    if backend_name not in ("csgmv", "torch_native"):
        raise ValueError(f"--lora-backend {backend_name} is not supported; use csgmv on GPU, torch_native on a CPU")
    if environment.get("SGLANG_EXPERIMENTAL_LORA_OPTI", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        raise ValueError("SGLANG_EXPERIMENTAL_LORA_OPTI reads slots beyond an adapter's rank; unset it")


def check_experts_supported(server_args, layers) -> None:
    """Raise ValueError for settings under which LoRA on experts would be wrong or left out. `layers`: SGLang's."""
    _refuse("LoRA on experts", server_args, _UNSUPPORTED_WITH_EXPERTS, _UNSUPPORTED_ABOVE_1_WITH_EXPERTS)
    if any(getattr(layer.base_layer, "use_intel_amx_backend", False) for layer in layers):
        raise ValueError("SGLang runs experts in its AMX kernel here, which applies no LoRA")
    others = [layer._lora_runner_backend for layer in layers if not layer._lora_runner_backend.is_triton()]
    if server_args.device != "cpu" and others:
        raise ValueError(
            f"SGLang runs experts with {others[0].value} here, and LoRA on experts has been run with triton only; add "
            "--moe-runner-backend triton to extra_arguments"
        )


def room_for_experts(original, pool, module_name, base_model, max_lora_dim, layer_idx):
    """The shape of a factor's slots. Experts have a largest rank of their own: each rank costs them gigabytes."""
    if pool.is_moe_module(module_name):
        max_lora_dim = expert_rank(os.environ)
    return original(pool, module_name, base_model, max_lora_dim, layer_idx)


def expert_rank(environment: Mapping[str, str]) -> int:
    """The largest rank of LoRA on experts that the slots have room for."""
    return int(environment.get(EXPERT_RANK_VARIABLE) or 0)


def complement_memory_pool(result, manager):
    """Check the settings, then attach the packed loader, the ReFT pool and what experts need to the memory pool."""
    from sglang.srt.runtime_context import get_server_args

    check_supported(get_server_args(), manager.lora_backend.name, os.environ)
    _prepare_experts(manager, get_server_args())
    make_packed_loader(manager)
    add_reft_to_layers(manager)
    return result


def _prepare_experts(manager, server_args) -> None:
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    from engine.adapter_slots.experts import AdaptedTokens

    layers = [module for module in manager.base_model.modules() if isinstance(module, FusedMoEWithLoRA)]
    if not layers:
        return
    if not expert_rank(os.environ):
        raise ValueError("--lora-target-modules names projections of experts; use adapter_limits.max_expert_rank")
    check_experts_supported(server_args, layers)
    tokens = AdaptedTokens()
    manager.memory_pool.prelude_experts = manager.lora_backend.prelude_experts = tokens
    if server_args.device == "cpu":
        manager.lora_backend.is_moe_lora = False  # then it prepares nothing for SGLang's kernels, which do not run
    else:
        _compile_alignment()


def _compile_alignment() -> None:
    """Compile SGLang's kernel that sorts tokens by expert, now and not while the first request for it waits."""
    import torch
    from sglang.kernels.ops.moe import moe_lora_align

    moe_lora_align._jit_moe_align_module(torch.int32)
