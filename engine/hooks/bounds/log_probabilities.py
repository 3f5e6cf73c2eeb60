"""Bodies of the hooks that keep answers with many log-probabilities from holding up the server's event loop.

SGLang makes a text of each token again and again, one position at a time: 0.3 s for a prompt of 16,000 tokens with one
alternative for each. Of an answer that is not streamed it makes an object for each log-probability, and FastAPI looks
at every one: a chat of 2,000 tokens with 100 alternatives each stopped the server for over two seconds.

So what SGLang makes of many log-probabilities is left out of the answer at first: a placeholder stands there. A thread
has SGLang's own functions make it, a few positions at a time, since both making and writing them hold the interpreter's
lock, and puts it in the placeholder's place in the JSON.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

MANY = 1024  # log-probabilities; fewer are made on the loop, where that is quicker, and as many make one piece
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


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """The log-probabilities of one choice: what stands in their place, and how to make them."""

    placeholder: Any  # SGLang's object, with one token that nothing else contains
    pieces: Callable[[], Iterator[Any]]  # SGLang's objects, whose lists make up those of the whole

    def put_into(self, answer: bytes) -> Iterator[bytes]:
        """The answer's JSON with the log-probabilities. Runs in a thread."""
        before, after = answer.split(self.placeholder.model_dump_json().encode())
        lists: dict[str, list[bytes]] = {name: [] for name in type(self.placeholder).model_fields}
        for piece in self.pieces():
            for name, written in lists.items():
                prefix = f'{{"{name}":['
                if part := piece.model_dump_json(include={name}).encode()[len(prefix) : -len("]}")]:
                    written += (b",", part) if written else (part,)
        yield before
        for number, (name, written) in enumerate(lists.items()):
            yield f'{"," if number else "{"}"{name}":['.encode()
            yield from written
            yield b"]"
        yield b"}" + after


_left_out: ContextVar[list[_LeftOut] | None] = ContextVar("log_probabilities_left_out", default=None)


def leave_out_of_chats(original, handler, item):
    """What a chat's choice says about its tokens, or a placeholder for many."""
    later, meta = _left_out.get(), item["meta_info"]
    tokens, alternatives = meta["output_token_logprobs"], meta.get("output_top_logprobs") or []
    if later is None or _count(tokens, alternatives) <= MANY:
        return original(handler, item)

    def made(some: Any, of_them: Any) -> Any:
        return original(handler, {"meta_info": {"output_token_logprobs": some, "output_top_logprobs": of_them}})

    def pieces() -> Iterator[Any]:
        step = _positions(tokens, alternatives)
        for start in range(0, len(tokens), step):
            yield made(tokens[start : start + step], alternatives[start : start + step])

    later.append(_LeftOut(made([_marked()], []), pieces))
    return later[-1].placeholder


def leave_out_of_completions(original, **lists):
    """What a completion's choice says about its tokens, or a placeholder for many. `lists`: of prompt and answer."""
    later = _left_out.get()
    given = {name: values for name, values in lists.items() if values}
    count = sum(_count((), values) if "top" in name else len(values) for name, values in given.items())
    if later is None or count <= MANY:
        return original(**lists)

    def pieces() -> Iterator[Any]:
        for name in ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs"):
            values = given.get(name, ())
            step = _positions(values, values if "top" in name else ())
            for start in range(0, len(values), step):
                yield original(**{name: values[start : start + step]})

    later.append(_LeftOut(original(output_token_logprobs=[_marked()]), pieces))
    return later[-1].placeholder


async def write_in_a_thread(original, handler, adapted_request, request, raw_request):
    """Answer a request that is not streamed. The JSON of one with many log-probabilities is written in a thread."""
    later: list[_LeftOut] = []
    token = _left_out.set(later)
    try:
        found = await original(handler, adapted_request, request, raw_request)
    finally:
        _left_out.reset(token)
    if not later or getattr(found, "usage", None) is None:  # an error
        return found

    def answer() -> Any:
        from fastapi import Response  # agents read the ledger, too, and have no use for it

        written = found.model_dump_json(by_alias=True).encode()
        for each in later:
            written = b"".join(each.put_into(written))
        return Response(written, media_type="application/json")

    return await asyncio.get_running_loop().run_in_executor(_threads, answer)


def _count(tokens: Any, alternatives: Any) -> int:
    return len(tokens) + sum(len(each) for each in alternatives if each)


def _positions(tokens: Any, alternatives: Any) -> int:
    """Of one piece."""
    return max(1, MANY * len(tokens) // max(1, _count(tokens, alternatives)))


def _marked() -> tuple[float, int, str]:
    """A log-probability of a token whose text is in no answer."""
    return 0.0, 0, secrets.token_hex(16)
