"""Refuses arguments under which KV would cross adapters or tenants, or prompts would be cut without a word."""

from __future__ import annotations

from typing import Any

# The class whose methods the hooks `finished_answers_are_no_prefix` and `retracted_answers_are_no_prefix` change.
_HOOKED_CACHE = "sglang.srt.mem_cache.radix_cache.RadixCache"
_HOOKED_METHODS = ("cache_finished_req", "cache_unfinished_req")

# Options of caches that exchange KV with a storage beyond the engine, or may do so.
_SHARED_STORAGE = ("enable_lmcache", "enable_flexkv", "hicache_storage_backend", "radix_cache_backend")


def check_prefix_cache(role: str, cache: Any, server_args: Any) -> None:
    """Raise ValueError unless requests of one namespace and revision alone share KV in an engine of this role.

    `cache` is the scheduler's. Stock engines, the baseline of benchmarks, may have any.
    """
    if role == "stock":
        return
    is_used = not cache.is_chunk_cache() and not getattr(cache, "disable", False)
    if role == "decode":
        if is_used:
            raise ValueError(
                "a decode engine cannot have a prefix cache: requests do not tell it their adapter, so one would "
                "continue with another one's KV; remove --disaggregation-decode-enable-radix-cache from "
                "extra_arguments"
            )
        return
    for name in _SHARED_STORAGE:
        if getattr(server_args, name, None):
            raise ValueError(
                f"--{name.replace('_', '-')} cannot be used with adapters: KV is stored by its tokens alone, so "
                "adapters and tenants would get one another's; remove it from extra_arguments"
            )
    if role == "unified" and is_used and (method := _unhooked_method(cache)):
        raise ValueError(
            f"the prefix cache {type(cache).__name__} cannot be used on a unified worker: its {method} would keep KV "
            "that decode wrote without the adapter; unset SGLANG_ENABLE_UNIFIED_RADIX_TREE and "
            "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE, remove options of sessions and caches from extra_arguments, or add "
            "--disable-radix-cache to them"
        )


def _unhooked_method(cache: Any) -> str | None:
    """The first method that the hooks must change and do not, because another class defines it for this cache."""
    for method in _HOOKED_METHODS:
        owner = next(each for each in type(cache).__mro__ if method in vars(each))
        if f"{owner.__module__}.{owner.__qualname__}" != _HOOKED_CACHE:
            return method
    return None


def check_whole_prompts(role: str, server_args: Any) -> None:
    """Raise ValueError if an engine of ours would cut prompts. Stock engines, the baseline of benchmarks, may."""
    if role != "stock" and server_args.allow_auto_truncate:
        raise ValueError(
            "--allow-auto-truncate cannot be used: each engine of a pair would cut a prompt to its own limit; remove "
            "it from extra_arguments, and prompts that are too long are refused"
        )
