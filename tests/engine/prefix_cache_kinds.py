"""Prints the roles that accept each of SGLang's prefix caches, and the settings of its that are refused, as JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace

from engine import cpu_support
from engine.hooks.settings import _REFUSED, _SHARED_STORAGE, check_role

cpu_support.install()


def main() -> None:
    from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.server_args import ServerArgs

    accepted = {}
    for kind in (UnifiedRadixCache, RadixCache, PureSWARadixCache):
        cache = object.__new__(kind)
        for disabled in (False, True):
            cache.disable = disabled
            name = kind.__name__ + disabled * " without a tree"
            accepted[name] = [role for role in ("decode", "prefill", "unified") if accepts(role, cache)]
    print(json.dumps({**accepted, "settings": sorted(set(ServerArgs.__struct_fields__).intersection(_SHARED_STORAGE))}))


def accepts(role: str, cache: object) -> bool:
    try:
        check_role(role, cache, SimpleNamespace(**dict.fromkeys((*_REFUSED, *_SHARED_STORAGE))))
    except ValueError:
        return False
    return True


main()
