"""Bodies of the hooks that keep answers with many log-probabilities from holding up the server's event loop.

SGLang makes a text of each token again and again, one position at a time, and FastAPI looks at every number of the
answer: 0.3 s for a prompt of 16,000 tokens with one alternative for each.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

LONG_TOKENS = 256  # prompt and answer; shorter answers are written on the loop, where that is quicker
_TEXTS = "_prelude_token_texts"  # of a tokenizer manager: token id -> text, at most the vocabulary
_threads = ThreadPoolExecutor(1, thread_name_prefix="answers")


def decode_each_token_once(original, manager, values, token_ids, decode_to_text):
    """(log-probability, token id, text) of each token; SGLang decodes the tokens that are new."""
    if not decode_to_text:
        return original(manager, values, token_ids, decode_to_text)
    texts: dict[int, str] = vars(manager).setdefault(_TEXTS, {})
    if new := [*(set(token_ids) - texts.keys())]:
        texts.update((token_id, text) for _, token_id, text in original(manager, [0.0] * len(new), new, True))
    return list(zip(values, token_ids, map(texts.__getitem__, token_ids), strict=False))


def decode_all_positions_at_once(original, manager, values, token_ids, decode_to_text):
    """Lists of alternatives as tuples, None for an empty one: one call for all positions instead of one for each."""
    rows = [(row, ids) for row, ids in zip(values, token_ids, strict=False) if row]
    if any(len(row) != len(ids) for row, ids in rows):
        return original(manager, values, token_ids, decode_to_text)
    flat = [[*chain.from_iterable(column)] for column in zip(*rows, strict=True)] or [[], []]
    found = iter(manager.detokenize_logprob_tokens(*flat, decode_to_text))
    return [[*islice(found, len(row))] if row else None for row in values]


async def write_in_a_thread(original, handler, adapted_request, request, raw_request):
    """Answer a request that is not streamed; a long answer with log-probabilities becomes JSON in a thread."""
    found = await original(handler, adapted_request, request, raw_request)
    usage = getattr(found, "usage", None)
    if request.logprobs is None or request.logprobs is False or usage is None or usage.total_tokens <= LONG_TOKENS:
        return found

    def answer() -> Any:
        from fastapi import Response  # agents read the ledger, too, and have no use for it

        return Response(found.model_dump_json(by_alias=True), media_type="application/json")

    return await asyncio.get_running_loop().run_in_executor(_threads, answer)
