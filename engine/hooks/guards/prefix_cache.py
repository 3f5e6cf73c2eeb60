"""Refuses arguments under which KV would cross adapters or tenants, prompts would be cut, or hooks be bypassed."""

from __future__ import annotations

from typing import Any

# The class whose method the hook `answers_are_no_prefix` changes. SGLang puts KV into its tree nowhere else.
_HOOKED_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_HOOKED_METHOD = "checkpoint_into_tree"

# Options of caches that exchange KV with a storage beyond the engine, or may do so.
_SHARED_STORAGE = (
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_cache_external_linker",
    "hicache_storage_backend",
    "radix_cache_backend",
)


def check_prefix_cache(role: str, cache: Any, settings: Any) -> None:
    """Raise ValueError unless requests of one namespace and revision alone share KV in an engine of this role.

    `cache` is the scheduler's. Stock engines, the baseline of benchmarks, may have any.
    """
    if role == "stock":
        return
    if role == "decode":
        if not cache.disable:
            raise ValueError(
                "a decode engine cannot have a prefix cache: requests do not tell it their adapter, so one would "
                "continue with another one's KV; remove --disaggregation-decode-enable-radix-cache from "
                "extra_arguments"
            )
        return
    for name in _SHARED_STORAGE:
        if getattr(settings, name):
            raise ValueError(
                f"--{name.replace('_', '-')} cannot be used with adapters: KV is stored by its tokens alone, so "
                "adapters and tenants would get one another's; remove it from extra_arguments"
            )
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


def check_entrances(role: str, settings: Any) -> None:
    """Raise ValueError if requests could reach an engine of ours past its hooks, or change its role."""
    refused = {
        "enable_pd_role_switch": "an engine has the hooks of the role that it starts in",
        "enable_http2": "its server asks no client for a certificate",
        "grpc_port": "its server asks for no key; unset SGLANG_GRPC_PORT, too",
    }
    for name, why in refused.items():
        if role != "stock" and getattr(settings, name):
            raise ValueError(f"--{name.replace('_', '-')} cannot be used: {why}; remove it from extra_arguments")


def check_whole_prompts(role: str, settings: Any) -> None:
    """Raise ValueError if an engine of ours would cut prompts. Stock engines, the baseline of benchmarks, may."""
    if role != "stock" and settings.allow_auto_truncate:
        raise ValueError(
            "--allow-auto-truncate cannot be used: each engine of a pair would cut a prompt to its own limit; remove "
            "it from extra_arguments, and prompts that are too long are refused"
        )
