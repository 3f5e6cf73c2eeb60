"""Bounds on what one request may take of an engine: grammars are forgotten, long requests leave its event loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from engine.hooks.requests import events, grammars, preparation
from engine.hooks.requests.events import EventPace
from engine.hooks.requests.grammars import CompiledGrammars

KIB = 1024


def grammar(num_bytes: int) -> Any:
    return SimpleNamespace(ctx=SimpleNamespace(memory_size_bytes=num_bytes))


def test_the_least_recently_used_grammar_is_forgotten() -> None:
    cache = CompiledGrammars(max_grammars=3)
    for name in "abc":
        cache["ebnf", name] = grammar(0)
    assert cache.get(("ebnf", "a")) is not None
    cache["ebnf", "d"] = grammar(0)
    assert [name for _, name in cache] == ["c", "a", "d"]
    assert cache.get(("ebnf", "b")) is None


def test_grammars_are_bounded_by_their_bytes() -> None:
    cache = CompiledGrammars(max_bytes=100 * KIB)
    for number in range(1000):
        cache["ebnf", str(number)] = grammar(30 * KIB)
    assert [name for _, name in cache] == ["997", "998", "999"]
    cache["ebnf", "999"] = grammar(80 * KIB)  # the same one again
    assert [name for _, name in cache] == ["999"]
    cache["ebnf", "reasoning"] = SimpleNamespace(grammar=grammar(90 * KIB))
    assert [name for _, name in cache] == ["reasoning"]
    cache["ebnf", "too large"] = grammar(101 * KIB)
    assert not cache
    for number in range(1000):  # those that failed to compile have no size, but a key
        cache["json", f"{number}" + "x" * 20 * KIB] = SimpleNamespace()
    assert len(cache) == 2
    cache.clear()
    cache["json", "a"] = grammar(90 * KIB)
    assert len(cache) == 1


def test_a_backend_gets_a_bounded_cache_and_few_threads() -> None:
    backend = SimpleNamespace(cache={}, executor=ThreadPoolExecutor())
    grammars.keep_the_latest(None, backend)
    assert isinstance(backend.cache, CompiledGrammars)
    assert backend.executor._max_workers == grammars.COMPILATIONS


def test_the_compilers_own_cache_is_bounded() -> None:
    compiler = grammars.with_a_bounded_cache(lambda **options: options)
    options = compiler(tokenizer_info="t")
    assert options["tokenizer_info"] == "t"
    assert options["cache_limit_bytes"] == grammars.MAX_BYTES
    assert options["max_threads"] >= 1


class Handler:
    """The parts of SGLang's handler that the hook uses."""

    def __init__(self, problem: str | Exception | None = None, failure: Exception | None = None) -> None:
        self.threads: list[bool] = []
        self._problem, self._failure = problem, failure

    def _validate_request(self, request: str) -> str | None:
        self.threads.append(threading.current_thread() is threading.main_thread())
        if isinstance(self._problem, Exception):
            raise self._problem
        return self._problem

    def _convert_to_internal_request(self, request: str, raw_request: Any) -> str:
        self.threads.append(threading.current_thread() is threading.main_thread())
        if self._failure is not None:
            raise self._failure
        return f"converted {request}"

    def answer(self, converted: str) -> str:
        return f"answered {converted}"


async def handle(handler: Any, request: str, raw_request: Any) -> str:
    """As SGLang's handle_request."""
    if problem := handler._validate_request(request):
        return f"refused: {problem}"
    return handler.answer(handler._convert_to_internal_request(request, raw_request))


def raw(num_bytes: int | None) -> Any:
    return SimpleNamespace(headers={} if num_bytes is None else {"content-length": str(num_bytes)})


@pytest.mark.parametrize("num_bytes", [10, 100_000, None])
def test_long_requests_are_prepared_in_a_thread(num_bytes: int | None) -> None:
    handler = Handler()
    found = asyncio.run(preparation.prepare_in_a_thread(handle, handler, "r", raw(num_bytes)))
    assert found == "answered converted r"
    assert handler.threads == [num_bytes == 10] * 2


def test_what_is_wrong_with_a_long_request_is_said_as_before() -> None:
    for handler, expected in (
        (Handler(problem="no"), "refused: no"),
        (Handler(problem=ValueError("broken")), ValueError),
        (Handler(failure=ValueError("broken")), ValueError),
    ):
        asking = preparation.prepare_in_a_thread(handle, handler, "r", raw(100_000))
        if isinstance(expected, str):
            assert asyncio.run(asking) == expected
        else:
            with pytest.raises(expected, match="broken"):
                asyncio.run(asking)


@pytest.mark.parametrize(("texts", "is_on_loop"), [("a", True), ("a" * 5000, False), (["a" * 3000] * 2, False)])
def test_long_texts_are_tokenized_in_a_thread(texts: Any, is_on_loop: bool) -> None:
    threads = []

    async def tokenize(manager: str, texts: Any, is_cross_encoder: bool) -> tuple[list[int], None]:
        threads.append(threading.current_thread() is threading.main_thread())
        return [len(texts)], None

    assert asyncio.run(preparation.tokenize_in_a_thread(tokenize, "m", texts)) == ([len(texts)], None)
    assert threads == [is_on_loop]


def paced(events_per_s: int, streams: int, steps_per_s: float, seconds: float) -> list[int]:
    """Tokens per event at each step of a load."""
    now = [0.0]
    pace = EventPace(events_per_s, lambda: now[0])
    found = []
    for _ in range(round(seconds * steps_per_s)):
        now[0] += 1 / steps_per_s
        found.append(pace.tokens_per_event(streams))
    return found


def test_events_carry_as_many_tokens_as_the_bound_needs() -> None:
    assert set(paced(8000, 64, 100, 2)) == {1}  # 6,400 tokens/s
    assert paced(8000, 128, 100, 2)[24:] == [2] * 176  # 12,800
    assert paced(8000, 512, 60, 2)[-1] == 4  # 30,720
    assert paced(8, 512, 60, 2)[-1] == events.MOST_TOKENS


def test_events_are_single_tokens_again_after_a_busy_time() -> None:
    now = [0.0]
    pace = EventPace(1000, lambda: now[0])
    for _ in range(100):
        now[0] += 0.01
        busy = pace.tokens_per_event(64)
    assert busy == 7
    now[0] += 5.0  # nobody asks
    assert pace.tokens_per_event(1) == 1


def streamed(pace: Any, *, speculates: bool = False) -> list[int | None]:
    """The intervals of a stream, of an answer that is not streamed, and of a stream whose first token is not sent."""
    requests = [
        SimpleNamespace(stream=stream, send_token_offset=sent, sampling_params=SimpleNamespace(stream_interval=None))
        for stream, sent in ((True, 5), (False, 0), (True, 0))
    ]
    streamer = SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: not speculates))
    sent: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "_pace", lambda: pace)
        events.stream_in_bounds(lambda *given: sent.append(given), streamer, requests, True, None)
    assert sent == [(streamer, requests, True, None)]
    return [each.sampling_params.stream_interval for each in requests]


def test_only_streams_that_have_begun_are_paced() -> None:
    asked: list[int] = []
    pace = SimpleNamespace(tokens_per_event=lambda count: asked.append(count) or 4)
    assert streamed(pace) == [4, None, None]
    assert asked == [2]
    assert streamed(pace, speculates=True) == [None, None, None]
    assert streamed(SimpleNamespace(tokens_per_event=lambda count: 1)) == [None, None, None]  # the engine's own
    assert streamed(None) == [None, None, None]
