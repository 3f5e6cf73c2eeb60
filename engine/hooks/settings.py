"""The settings of an engine as SGLang has resolved them, and those that engines refuse."""

from collections.abc import Mapping
from typing import Any

# The class whose method the hook `answers_are_no_prefix` changes. SGLang puts KV into its tree nowhere else.
_HOOKED_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_HOOKED_METHOD = "checkpoint_into_tree"

_REFUSED = {
    "speculative_algorithm": "steps cost more than guesses bring, and hooks do not tell drafts from answers",
    "enable_pd_role_switch": "an engine has the hooks of the role that it starts in",
    "enable_http2": "its server asks no client for a certificate",
    "grpc_port": "its server asks for no key; unset SGLANG_GRPC_PORT, too",
    "allow_auto_truncate": "each engine of a pair would cut a prompt to its own limit; too long ones are refused",
}
# Options of caches that exchange KV with a storage beyond the engine, or may do so.
_SHARED_STORAGE = dict.fromkeys(
    (
        "enable_lmcache",
        "enable_flexkv",
        "enable_unified_cache_external_linker",
        "hicache_storage_backend",
        "radix_cache_backend",
    ),
    "KV is stored by its tokens alone, so adapters and tenants would get one another's",
)

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
    "enable_pdmux": "prompts and answers run at the same time, and the hooks keep the state of one batch",
    "max_loaded_loras": "the engine would evict adapters on its own, and the agent would not know",
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


class ResolvedSettings:
    """Reads each setting by its name in `ServerArgs`, which itself has only what the command line said.

    Raises AttributeError for a name that SGLang does not have (any longer).
    """

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.arg_groups.arg_utils import namespace_of
        from sglang.srt.runtime_context import get_context

        context = get_context()
        path = namespace_of(type(context.server_args)).get(name)
        if path is None:
            return getattr(context.server_args, name)
        top, *rest = path.split(".")
        found: Any = context.config_bag(top)
        for part in (*rest, name):
            found = getattr(found, part)
        return found


def _refuse(what: str, settings: Any, refused: Mapping[str, str], above_1: Mapping[str, str] = {}) -> None:
    """Raise ValueError if a setting of `refused` is on, or one of `above_1` is above 1."""
    for name, why in {**refused, **above_1}.items():
        unset = (None, 1) if name in above_1 else (None, False, "", "none", "trivial")
        if getattr(settings, name) not in unset:
            option = f"--{name.replace('_', '-')}{' above 1' if name in above_1 else ''}"
            raise ValueError(f"{option} cannot be used with {what}: {why}; remove it from extra_arguments")


def check_role(role: str, cache: Any, settings: Any, *, switches: bool = False) -> None:
    """Raise ValueError if requests could pass an engine's hooks, or share KV beyond one namespace and revision.

    `cache` is the scheduler's prefix cache; `switches`: the engine has the hooks of both ends of a pair. Stock engines,
    the baseline of benchmarks, may have any settings.
    """
    if role == "stock":
        return
    own = {"enable_pd_role_switch"} if switches else set()
    _refuse("Prelude", settings, {name: why for name, why in _REFUSED.items() if name not in own})
    if role == "decode":
        if not cache.disable:
            raise ValueError(
                "a decode engine cannot have a prefix cache: requests do not tell it their adapter, so one would "
                "continue with another one's KV; remove --disaggregation-decode-enable-radix-cache from "
                "extra_arguments"
            )
        return
    _refuse("adapters", settings, _SHARED_STORAGE)
    if role == "unified" and not cache.disable and not _is_hooked(cache):
        raise ValueError(
            f"the prefix cache {type(cache).__name__} cannot be used on a unified worker: it would keep KV that decode "
            "wrote without the adapter; remove options of caches from extra_arguments, or add --disable-radix-cache "
            "to them"
        )


def _is_hooked(cache: Any) -> bool:
    """Whether the hook's method is the one that puts KV into this cache."""
    owners = [f"{each.__module__}.{each.__qualname__}" for each in type(cache).__mro__ if _HOOKED_METHOD in vars(each)]
    return owners[:1] == [_HOOKED_CACHE]


def check_adapters(settings, backend_name: str, environment: Mapping[str, str]) -> None:
    """Raise ValueError for settings under which adapters would give wrong results."""
    _refuse("adapters", settings, _UNSUPPORTED, _UNSUPPORTED_ABOVE_1)
    if backend_name not in ("csgmv", "torch_native"):
        raise ValueError(f"--lora-backend {backend_name} is not supported; use csgmv on GPU, torch_native on a CPU")
    if environment.get("SGLANG_EXPERIMENTAL_LORA_OPTI", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        raise ValueError("SGLANG_EXPERIMENTAL_LORA_OPTI reads slots beyond an adapter's rank; unset it")


def check_experts(settings, layers) -> None:
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
