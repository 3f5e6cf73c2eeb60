"""Prints the roles that accept each of SGLang's prefix caches, and the settings of its that are refused, as JSON."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

from engine import cpu_support
from engine.hooks.guards.prefix_cache import _SHARED_STORAGE, check_prefix_cache

cpu_support.install()


def main() -> None:
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
    from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.server_args import ServerArgs

    accepted = {}
    for kind in (ChunkCache, RadixCache, HiRadixCache, UnifiedRadixCache, PureSWARadixCache):
        cache = object.__new__(kind)
        if kind is not ChunkCache:  # which caches nothing and says so
            cache.disable = False
        accepted[kind.__name__] = [role for role in ("decode", "prefill", "unified") if accepts(role, cache)]
    names = {field.name for field in dataclasses.fields(ServerArgs)}
    print(json.dumps({**accepted, "settings": sorted(names.intersection(_SHARED_STORAGE))}))


def accepts(role: str, cache: object) -> bool:
    try:
        check_prefix_cache(role, cache, SimpleNamespace())
    except ValueError:
        return False
    return True


main()
