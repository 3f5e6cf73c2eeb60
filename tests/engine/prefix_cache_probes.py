"""Prints what SGLang's own prefix caches find for each prober, and who may have which of them, as JSON.

Input: [core of the tree, tokens of a page, cases] on the command line, as often as wanted. Each case is a list of
[extra_key of the router, revision or null], the victim's first.
"""

import json
import sys
from array import array
from types import SimpleNamespace

from engine import cpu_support

cpu_support.install()

import torch  # noqa: E402
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import _req_radix_key  # noqa: E402
from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from engine.hooks.settings import _REFUSED, _SHARED_STORAGE, check_role  # noqa: E402

SECRET = [*range(100, 228)]


def new_cache(core: str, page: int) -> UnifiedRadixCache:
    pool = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": False}
    allocator = TokenToKVPoolAllocator(1024, **pool) if page == 1 else PagedTokenToKVPoolAllocator(1024, page, **pool)
    parts = (ComponentType.FULL,)
    cache = UnifiedRadixCache(
        CacheInitParams(False, None, allocator, page, tree_components=parts, tree_core_backend=core)
    )
    assert cache._tree_core_backend == core
    return cache


def key(cache: UnifiedRadixCache, extra_key: str | None, revision: str | None):
    ids = array("q", SECRET)
    request = Req("r", "", ids, SamplingParams(), extra_key=extra_key, lora_id=revision)  # joins the two
    return _req_radix_key(cache, request, ids)


def found(core: str, page: int, cases: list[list[list[str | None]]]) -> list[list]:
    """For each case, cached tokens that the first of it finds of its own prompt, and those that each other finds."""
    answers = []
    for victim, *probers in cases:
        cache = new_cache(core, page)
        cache.insert(InsertParams(key=key(cache, *victim), value=torch.arange(len(SECRET))))
        own, *others = (
            cache.match_prefix(MatchPrefixParams(key=key(cache, *who))).device_prefix_len for who in (victim, *probers)
        )
        answers.append([own, others])
    return answers


def accepted() -> dict[str, list[str]]:
    """The roles whose engines may have a cache."""
    roles = {}
    for kind in (UnifiedRadixCache, RadixCache, PureSWARadixCache):
        cache = object.__new__(kind)
        for disabled in (False, True):
            cache.disable = disabled
            name = kind.__name__ + disabled * " without a tree"
            roles[name] = [role for role in ("decode", "prefill", "unified") if accepts(role, cache)]
    return roles


def accepts(role: str, cache: object) -> bool:
    try:
        check_role(role, cache, SimpleNamespace(**dict.fromkeys((*_REFUSED, *_SHARED_STORAGE))))
    except ValueError:
        return False
    return True


get_context().override_server_args(device="cpu").install()
settings = sorted(set(ServerArgs.__struct_fields__).intersection(_SHARED_STORAGE))
probed = [found(*json.loads(words)) for words in sys.argv[1:]]
print(json.dumps({"found": probed, "accepted": accepted(), "settings": settings}))
