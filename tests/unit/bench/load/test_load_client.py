"""What the client measures, and how it counts every way in which an endpoint can be bad."""

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web
from support.bench.streaming_mock import MockServer, event, stream, stream_of, usage

from bench.load.client import Client, ask_models
from bench.load.events import EventStream, MalformedStream
from bench.load.options import Endpoint, Engine, Prefill
from bench.load.record import (
    ERROR_ANSWER,
    ERROR_EVENT,
    MALFORMED,
    TIMED_OUT,
    TRUNCATED,
    UNREACHABLE,
    Record,
)
from bench.workloads.session import COMPLETIONS, Request

REQUEST = Request(COMPLETIONS, {"prompt": [1, 2, 3]}, 4, prompt_tokens=3)


async def ask(server: MockServer, timeout_s: float = 60.0, **fields: Any) -> Record:
    """The record of one request to the server."""
    async with server.running():
        endpoint = Endpoint(server.url, "mock", timeout_s=timeout_s, **fields)
        async with Client(endpoint, time.monotonic) as client:
            return await client.send(REQUEST, 0 if endpoint.adapters else None, time.monotonic(), 7, 0)


async def test_times_are_exact_by_a_clock_that_only_the_server_moves():
    """Each event is written when the one before has been read, so TTFT and gaps are what the server made them."""
    now_s = 100.0
    read = asyncio.Event()

    def clock() -> float:
        read.set()
        return now_s

    async def answer(_server: MockServer, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        nonlocal now_s
        response = await stream_of(request)
        for delay_s in (0.25, 0.01, 0.02, 0.04):
            now_s += delay_s
            read.clear()
            await response.write(event())
            await read.wait()
        await response.write(usage(3, 4) + b"data: [DONE]\n\n")
        return response

    async with MockServer(answer).running() as server, Client(Endpoint(server.url, "mock"), clock) as client:
        record = await client.send(REQUEST, None, 99.5, 0, 0)
    assert record.error is None
    assert record.ttft_s == pytest.approx(0.75, abs=1e-6)  # from the intended time, half a second before
    assert record.itl_s == pytest.approx([0.01, 0.02, 0.04], abs=1e-6)
    assert record.tpot_s == pytest.approx(0.07 / 3, abs=1e-6)
    assert (record.prompt_tokens, record.output_tokens) == (3, 4)


def respond(status: int, **fields: Any) -> Any:
    async def answer(_server: MockServer, _request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(status=status, **fields)

    return answer


def streaming(*parts: bytes, breaks: bool = False) -> Any:
    async def answer(_server: MockServer, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = await stream_of(request)
        for part in parts:
            await response.write(part)
        if breaks:
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer


async def hang(_server: MockServer, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    response = await stream_of(request)
    await response.write(event())
    await asyncio.Event().wait()
    return response


async def drop(_server: MockServer, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


BAD = {
    "refused": (respond(429, data={"error": {"code": "full", "message": "later"}}), ERROR_ANSWER, 429, "full"),
    "error in words": (respond(500, text="no"), ERROR_ANSWER, 500, "no"),
    "error of SGLang": (
        respond(400, data={"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}),
        ERROR_ANSWER, 400, "too long",
    ),
    "error of vLLM": (
        respond(404, data={"error": {"message": "no such model", "type": "NotFoundError", "code": "404"}}),
        ERROR_ANSWER, 404, "no such model",
    ),
    "error event": (
        streaming(event(), b'data: {"error": {"code": "worker_lost"}}\n\n'), ERROR_EVENT, 200, "worker_lost"
    ),
    "cut short": (streaming(event(), event()), TRUNCATED, 200, "no [DONE] after 2 events"),
    "broken": (streaming(event(), event(), breaks=True), TRUNCATED, None, ""),
    "empty": (streaming(b"data: [DONE]\n\n"), TRUNCATED, 200, "no token"),
    "no stream": (respond(200, data={"choices": []}), MALFORMED, 200, "application/json"),
    "no JSON": (streaming(b"data: {oops\n\n"), MALFORMED, None, "oops"),
    "no connection": (drop, UNREACHABLE, None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_every_bad_endpoint_is_a_kind_of_its_own(name: str):
    answer, kind, status, detail = BAD[name]
    record = await ask(MockServer(answer))
    assert (record.error, record.status) == (kind, status)
    assert detail in record.detail
    assert (record.session, record.turn) == (7, 0)


@pytest.mark.slow
async def test_a_hang_ends_at_the_timeout_and_what_came_before_is_kept():
    record = await ask(MockServer(hang), timeout_s=3.0)  # long enough for the first event on a slow machine
    assert (record.error, len(record.token_s)) == (TIMED_OUT, 1)
    assert record.e2e_s > 2.9  # the event loop's timers are as coarse as a millisecond


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("adapter", {"model": "mock", "adapter": "x"}),
        ("model", {"model": "x"}),
        ("lora_path", {"model": "mock", "lora_path": "x"}),
        ("none", {"model": "mock"}),
    ],
)
async def test_an_adapter_is_named_as_the_server_wants_it(field: str, expected: dict[str, str]):
    server = MockServer()
    headers, more = {"authorization": "Bearer k"}, {"n": 1}
    record = await ask(server, adapters=("x",), adapter_field=field, headers=headers, extra_body=more)
    assert record.adapter == "x"
    named = {key: value for key, value in server.bodies[0].items() if key in ("model", "adapter", "lora_path", "none")}
    assert named == expected
    assert server.headers[0]["authorization"] == "Bearer k"
    assert (server.bodies[0]["n"], server.bodies[0]["ignore_eos"], server.bodies[0]["max_tokens"]) == (1, True, 4)


def read(*events: bytes, gap_s: float = 1.0) -> EventStream:
    """The stream after these events, one each second."""
    found = EventStream()
    for number, each in enumerate(events, 1):
        found.feed(each, gap_s * number)
    return found


DONE = b"data: [DONE]\n\n"


def test_a_last_token_without_text_counts_when_it_came():
    """SGLang's completions have the last token and the reason of the end in one event; special tokens have no text."""
    assert read(event("", "length"), usage(5, 1), DONE).token_s == [1.0]
    assert read(event(), event(), event("", "length"), usage(5, 3), DONE).token_s == [1.0, 2.0, 3.0]
    # Not a token by the server's count, or without one: nothing is known of it.
    assert read(event(), event("", "stop"), usage(5, 1), DONE).token_s == [1.0]
    assert read(event(), event("", "stop"), DONE).token_s == [1.0]
    assert read(event("", "stop"), usage(5, 0), DONE).token_s == []


def test_the_end_of_a_chat_is_no_token_unless_it_is_all_there_is():
    begin = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    end = event("", "stop", is_chat=True)
    assert read(begin, end, usage(5, 1), DONE).token_s == [2.0]
    uncounted = read(begin, event(is_chat=True), event("", is_chat=True), end, DONE)
    assert uncounted.token_s == [2.0, 3.0]
    # Several tokens in an event: that the server counts more of them does not make the end one more event.
    assert read(begin, event(is_chat=True), event(is_chat=True), end, usage(5, 8), DONE).token_s == [2.0, 3.0]


async def test_no_proxy_may_compress_a_stream():
    """Those that do because they may would hold events back, and nothing here could read them."""

    async def compressed(_server: MockServer, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        response.enable_compression()  # if the client takes it
        await response.prepare(request)
        await response.write(event() + usage(3, 1) + DONE)
        return response

    assert (await ask(MockServer(compressed))).error is None


def test_events_may_come_in_any_pieces():
    whole = b": comment\r\n\r\n" + event() + b"event: x\n" + event("", "length") + usage(5, 1) + b"data: [DONE]\n\n"
    for size in (1, 7, len(whole)):
        found = EventStream()
        for at in range(0, len(whole), size):
            found.feed(whole[at : at + size], 1.0)
        assert (len(found.token_s), found.is_done, found.prompt_tokens, found.output_tokens) == (1, True, 5, 1)


def test_a_line_without_end_is_refused():
    found = EventStream()
    found.feed(b"x" * 4_000_000, 0.0)
    with pytest.raises(MalformedStream, match="a line of more than"):
        found.feed(b"x" * 1_000_000, 0.0)


@pytest.mark.parametrize(
    ("model", "served"),
    [
        ({"id": "mock", "owned_by": "vllm"}, ("mock", "vllm")),
        ({"id": "acme/legal", "parent": "base", "owned_by": "prelude"}, ("base", "prelude")),  # an adapter's base
    ],
)
async def test_the_model_is_asked_for(model: dict[str, str], served: tuple[str, str]):
    async with MockServer(stream, model=model).running() as server:
        found = await ask_models(server.url, {})
    assert (found.model, found.server) == served


async def ask_pair(prefill: MockServer, decode: MockServer, session: int = 0, **fields: Any) -> Record:
    """The record of one request to a pair, the second of two engines."""
    async with prefill.running(), decode.running():
        pair = Engine(decode.url, Prefill(prefill.url, "10.0.0.1", 77), **fields)
        engines = (Engine("http://127.0.0.1:9"), pair)
        endpoint = Endpoint("http://x", "mock", ("a0",), "lora_path", timeout_s=60.0, engines=engines)
        async with Client(endpoint, time.monotonic) as client:
            return await client.send(REQUEST, 0, time.monotonic(), session, 0)


async def test_both_engines_of_a_pair_are_called_and_only_one_has_the_adapter():
    prefill, decode = MockServer(), MockServer()
    found = await ask_pair(prefill, decode, session=1)
    assert (found.error, found.output_tokens) == (None, 4)
    (to_prefill,), (to_decode,) = prefill.bodies, decode.bodies
    assert to_prefill.pop("lora_path") == "a0"
    assert "lora_path" not in to_decode
    assert to_prefill.pop("stream") is False
    assert to_decode.pop("stream") is True
    assert "stream_options" not in to_prefill
    assert to_decode.pop("stream_options")
    assert to_prefill == to_decode
    assert (to_decode["bootstrap_host"], to_decode["bootstrap_port"]) == ("10.0.0.1", 77)
    assert 0 <= to_decode["bootstrap_room"] < 2**63
    assert (await ask_pair(prefill, decode, session=2)).error == UNREACHABLE  # sessions take turns
    await ask_pair(prefill, decode, session=3, decode_has_adapters=True)
    assert decode.bodies[-1]["lora_path"] == "a0"


@pytest.mark.parametrize("bad", ["prefill", "decode"])
async def test_an_error_of_either_engine_of_a_pair_ends_the_request(bad: str):
    servers = {name: MockServer(first_s=0.0 if name == bad else 50.0) for name in ("prefill", "decode")}
    servers[bad].answer = respond(503, data={"error": {"message": "no room"}})
    found = await ask_pair(servers["prefill"], servers["decode"], session=1)
    assert (found.error, found.status) == (ERROR_ANSWER, 503)
    assert found.detail == ("prefill: no room" if bad == "prefill" else "no room")
