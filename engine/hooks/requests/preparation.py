"""Bodies of the hooks that prepare long requests in threads: templates, schemas of tools, tokenisation.

SGLang does this on the event loop of its HTTP server, which stands still meanwhile: 0.2 s for a prompt of 100,000
tokens. Its own functions run in the threads; short requests stay on the loop, where they are quicker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LONG_BYTES = 4096  # of a request's body; of a text, characters
_MAX_EXACT = 2**53  # the integers of JSON that every client reads exactly
_threads = ThreadPoolExecutor(2, thread_name_prefix="preparation")


class _Prepared:
    """Stands in for SGLang's handler in one request: two of its steps are done, the rest is its own."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._problem: Callable[[], Any] = _nothing
        self._converted: Callable[[], Any] = _nothing

    def prepare(self, request: Any, raw_request: Any) -> None:
        self._problem = _outcome(self._handler._validate_request, request)
        try:
            if self._problem():
                return
        except Exception:  # noqa: BLE001 the caller raises it again
            return
        self._converted = _outcome(self._handler._convert_to_internal_request, request, raw_request)

    def _validate_request(self, _request: Any) -> Any:
        return self._problem()

    def _convert_to_internal_request(self, _request: Any, _raw_request: Any = None) -> Any:
        return self._converted()

    async def _handle_non_streaming_request(self, *arguments: Any) -> Any:
        answer = self._handler._handle_non_streaming_request
        if not _is_for_tokenizer(self._handler):
            return await answer(*arguments)
        return await asyncio.get_running_loop().run_in_executor(_threads, _written, answer, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


async def prepare_in_a_thread(original, handler, request, raw_request):
    """Handle a request; a long one is validated and converted in a thread, and the tokenizer's are answered there."""
    is_long = _num_bytes(raw_request) > LONG_BYTES
    if not is_long and not _is_for_tokenizer(handler):
        return await original(handler, request, raw_request)
    prepared = _Prepared(handler)
    await asyncio.get_running_loop().run_in_executor(_threads, prepared.prepare, request, raw_request)
    return await original(prepared, request, raw_request)


async def tokenize_in_a_thread(original, manager, texts, is_cross_encoder=False):
    """Tokenise a text; a long one in a thread. The original awaits nothing."""
    if len(texts) <= LONG_BYTES if isinstance(texts, str) else sum(map(len, texts)) <= LONG_BYTES:
        return await original(manager, texts, is_cross_encoder)
    return await asyncio.get_running_loop().run_in_executor(
        _threads, lambda: asyncio.run(original(manager, texts, is_cross_encoder))
    )


def _is_for_tokenizer(handler: Any) -> bool:
    """Whether it answers /v1/tokenize or /v1/detokenize."""
    return type(handler).__module__.endswith(".serving_tokenize")


def _written(answer: Callable[..., Any], *arguments: Any) -> Any:
    """The JSON of an answer that awaits nothing. FastAPI would look at each of 100,000 ids on the event loop.

    transformers gives a tokenizer without a limit of length one of 10^30, which SGLang's JSON encoder refuses.
    """
    from fastapi.responses import ORJSONResponse  # agents read the ledger, too, and have no use for it
    from pydantic import BaseModel

    found = asyncio.run(answer(*arguments))
    if not isinstance(found, BaseModel):
        return found
    fields = found.model_dump()
    if fields.get("max_model_len", 0) > _MAX_EXACT:
        fields["max_model_len"] = -1
    return ORJSONResponse(fields)


def _num_bytes(raw_request: Any) -> int:
    length = raw_request.headers.get("content-length", "") if raw_request is not None else ""
    return int(length) if length.isdigit() else LONG_BYTES + 1


def _nothing() -> None:
    return None


def _outcome(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """What a call returns or raises, to be returned or raised later."""
    try:
        result = function(*arguments)
    except Exception as error:  # noqa: BLE001 raised again by the caller
        return lambda error=error: _raise(error)  # type: ignore[misc]
    return lambda: result


def _raise(error: Exception) -> Any:
    raise error
