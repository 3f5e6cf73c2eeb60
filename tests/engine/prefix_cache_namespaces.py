"""Prints what SGLang's own prefix cache finds for each prober, by the namespaces that the router gives, as JSON.

Input: the tokens of a page and a list of cases on the command line. Each case is a list of [extra_key of the router,
revision or null], the victim's first.
"""

from __future__ import annotations

import json
import sys
from array import array

from engine import cpu_support

cpu_support.install()


def main() -> None:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
    from sglang.srt.sampling.sampling_params import SamplingParams

    def key(tokens: list[int], extra_key: str | None, revision: str | None) -> RadixKey:
        ids = array("q", tokens)
        request = Req("r", "", ids, SamplingParams(), extra_key=extra_key, lora_id=revision)  # joins the two
        return RadixKey(ids, request.extra_key)

    def num_cached(cache: RadixCache, who: list[str | None]) -> int:
        return len(cache.match_prefix(MatchPrefixParams(key=key(secret, *who))).device_indices)

    secret, found = [*range(100, 228)], []
    for victim, *probers in json.loads(sys.argv[2]):
        cache = RadixCache.create_simulated(page_size=int(sys.argv[1]))
        cache.insert(InsertParams(key=key(secret, *victim)))
        found.append([num_cached(cache, victim), [num_cached(cache, prober) for prober in probers]])
    print(json.dumps(found))


main()
