"""Prints what SGLang's own prefix cache finds for each prober, by the namespaces that the router gives, as JSON.

Input: the core of the tree, the tokens of a page and a list of cases on the command line. Each case is a list of
[extra_key of the router, revision or null], the victim's first.
"""

from __future__ import annotations

import json
import sys
from array import array

from engine import cpu_support

cpu_support.install()


def main() -> None:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.common import _req_radix_key
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.runtime_context import get_context
    from sglang.srt.sampling.sampling_params import SamplingParams

    core, page = sys.argv[1], int(sys.argv[2])
    get_context().override_server_args(device="cpu").install()
    secret, found = [*range(100, 228)], []

    def new_cache() -> UnifiedRadixCache:
        pool = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": False}
        allocator = (
            TokenToKVPoolAllocator(1024, **pool) if page == 1 else PagedTokenToKVPoolAllocator(1024, page, **pool)
        )
        parts = (ComponentType.FULL,)
        return UnifiedRadixCache(
            CacheInitParams(False, None, allocator, page, tree_components=parts, tree_core_backend=core)
        )

    def key(cache: UnifiedRadixCache, extra_key: str | None, revision: str | None):
        ids = array("q", secret)
        request = Req("r", "", ids, SamplingParams(), extra_key=extra_key, lora_id=revision)  # joins the two
        return _req_radix_key(cache, request, ids)

    def num_cached(cache: UnifiedRadixCache, who: list[str | None]) -> int:
        return cache.match_prefix(MatchPrefixParams(key=key(cache, *who))).device_prefix_len

    for victim, *probers in json.loads(sys.argv[3]):
        cache = new_cache()
        assert cache._tree_core_backend == core
        cache.insert(InsertParams(key=key(cache, *victim), value=torch.arange(len(secret))))
        found.append([num_cached(cache, victim), [num_cached(cache, prober) for prober in probers]])
    print(json.dumps(found))


main()
