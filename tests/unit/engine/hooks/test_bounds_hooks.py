"""Bounds on what one request may take of an engine: grammars are forgotten, events carry several tokens."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from engine.hooks.requests import events, grammars
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


def test_backends_get_bounded_caches_and_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one of a model that reasons, around the other."""
    monkeypatch.setattr(grammars, "compiler_for", lambda info: f"bounded for {info}")
    inner = SimpleNamespace(
        cache={}, executor=ThreadPoolExecutor(), grammar_compiler="unbounded", _tokenizer_info="the tokenizer"
    )
    outer = SimpleNamespace(cache={}, executor=ThreadPoolExecutor(), grammar_backend=inner)
    grammars.keep_the_latest(None, SimpleNamespace(grammar_backend=outer))
    for backend in (inner, outer):
        assert isinstance(backend.cache, CompiledGrammars)
        assert backend.executor._max_workers == grammars.COMPILATIONS
    assert inner.grammar_compiler == "bounded for the tokenizer"


def paced(events_per_s: int, streams: int, steps_per_s: int) -> list[int]:
    """Tokens per event at each step of a load of two seconds."""
    now = [0.0]
    pace = EventPace(events_per_s, lambda: now[0])
    found = []
    for _ in range(2 * steps_per_s):
        now[0] += 1 / steps_per_s
        found.append(pace.tokens_per_event(streams))
    return found


def test_events_carry_as_many_tokens_as_the_bound_needs() -> None:
    assert set(paced(8000, 64, 100)) == {1}  # 6,400 tokens/s
    assert paced(8000, 128, 100)[24:] == [2] * 176  # 12,800
    assert paced(8000, 512, 60)[-1] == 4  # 30,720
    assert paced(8, 512, 60)[-1] == events.MOST_TOKENS


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
