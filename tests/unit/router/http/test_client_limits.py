"""What hostile or broken clients can do to a listener: headers, framing, silence, slowness, numbers of connections."""

import asyncio
import json
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.http.listener import GET, LAST_GET, Listener, listening, until, until_closed

from router.http import connections as connections_module
from router.http.client_connection import SCOPE_KEY
from router.http.connections import ClientConnections, ConnectionLimits

WAIT = b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n"
LAST_WAIT = b"GET /wait HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def refusal(answer: bytes) -> tuple[int, str]:
    """Status and code of the last answer."""
    head, _, body = answer[answer.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


POST, CHUNKED = b"POST /a HTTP/1.1\r\nhost: x\r\n", b"transfer-encoding: chunked\r\n\r\n"


TOO_LARGE: tuple[tuple[list[bytes], int, str], ...] = (
    ([b"GET / HTTP/1.1\r\nx: ", *[b"a" * 50_000] * 20], 431, "headers_too_large"),  # one that does not end
    ([b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000 + b"\r\n\r\n"], 431, "headers_too_large"),
    ([b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * 200 + b"\r\n"], 431, "headers_too_large"),
    ([b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"], 414, "target_too_long"),
    ([b"GET /?" + b"a" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"], 414, "target_too_long"),
    ([b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n"], 400, "invalid_http"),
    ([POST + CHUNKED + b"1;", *[b"e" * 50_000] * 20], 431, "headers_too_large"),
    ([POST + CHUNKED + b"0\r\nt: ", *[b"e" * 50_000] * 20], 431, "headers_too_large"),
)


async def test_sizes():
    async with listening() as listener:
        for parts, status, code in TOO_LARGE:
            assert refusal(await listener.ask(*parts)) == (status, code)
        assert listener.refused == [code for _, _, code in TOO_LARGE]
        assert listener.seen == []


# test_request_framing.py has lengths and encodings that contradict each other.
SMUGGLING = {
    "a space before the colon": POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "a space before the name": b"POST /a HTTP/1.1\r\n host: x\r\n\r\n",
    "a folded header": POST + b"x: a\r\n b\r\ncontent-length: 0\r\n\r\n",
    "a bare CR in a value": POST + b"x: a\rcontent-length: 4\r\n\r\n",
    "a bare LF after a value": POST + b"x: a\ncontent-length: 0\r\n\r\n",
    "a bare LF after the headers": POST + b"content-length: 0\r\n\n",
    "a NUL": POST + b"x: \x00\r\n\r\n",
    "no colon": POST + b"content-length 4\r\n\r\n",
    "an empty name": POST + b": 4\r\n\r\n",
    "a negative length": POST + b"content-length: -1\r\n\r\n",
    "an endless length": POST + b"content-length: 99999999999999999999\r\n\r\n",
    "a chunk that is too large": POST + CHUNKED + b"fffffffffffffffff\r\na\r\n0\r\n\r\n",
    "a chunk in 0x": POST + CHUNKED + b"0x1\r\na\r\n0\r\n\r\n",
    "a negative chunk": POST + CHUNKED + b"-1\r\na\r\n0\r\n\r\n",
    "a chunk of another size": POST + CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    "bare LF after a chunk's size": POST + CHUNKED + b"1\na\r\n0\r\n\r\n",
    "a request line with LF": b"GET /a HTTP/1.1\nhost: x\n\n",
    "HTTP/0.9": b"GET /a\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00",
    "a fragment": b"GET /a#b HTTP/1.1\r\nhost: x\r\n\r\n",
    "no host": b"GET /a HTTP/1.1\r\n\r\n",
    "a method that is none": b"G\x00T /a HTTP/1.1\r\nhost: x\r\n\r\n",
}


async def test_ambiguous_framing_is_refused():
    """A proxy before the router might see another request behind these. Nothing behind them is served."""
    async with listening() as listener:
        for name, request in SMUGGLING.items():
            answer = await listener.ask(request + b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n")
            assert refusal(answer) == (400, "invalid_http"), name
            assert answer.count(b"HTTP/1.1 ") == 1, name
        assert listener.seen == []


async def test_what_is_no_trick_is_served():
    async with listening() as listener:
        chunked = b"connection: close\r\n" + CHUNKED
        trailers = b"2;a=b\r\nab\r\n0\r\nauthorization: stolen\r\nhost: y\r\n\r\n"
        answer = await listener.ask(POST + chunked + trailers)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"authorization" not in listener.headers[0]  # a trailer joins no headers
        assert listener.headers[0][b"host"] == b"x"
        await listener.ask(b"GET http://other/b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert listener.seen == [("POST", "/a", 2), ("GET", "/b", 0)]


async def test_what_follows_a_trailer_that_closes_is_refused_and_not_swallowed():
    async with listening() as listener:
        chunks = CHUNKED + b"0\r\nconnection: close\r\n\r\n"
        answer = await listener.ask(POST + chunks, GET)
        assert answer.startswith(b"HTTP/1.1 200")
        assert refusal(answer) == (400, "invalid_http")
        assert listener.seen == [("POST", "/a", 0)]


async def test_garbage_behind_a_request_does_not_get_into_its_answer():
    async with listening() as listener:
        reader, _ = await listener.open(WAIT + GET + b"GARBAGE\x00\r\n\r\n")
        await until(lambda: listener.refused == ["invalid_http"])
        listener.may_answer.set()
        answer = await until_closed(reader)
        assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1 ") == 2
        assert answer.endswith(b"\r\n\r\n/")


async def test_a_pipeline_has_an_end():
    async with listening(max_pipelined=4) as listener:
        reader, _ = await listener.open(WAIT + GET * 1000)
        await until(lambda: listener.refused == ["too_many_pipelined"])
        listener.may_answer.set()
        assert (await until_closed(reader)).count(b"HTTP/1.1 200") == len(listener.seen) == 1 + 4


async def test_a_silent_connection_is_closed_without_a_word():
    async with listening(header_timeout_s=0.3) as listener:
        assert await listener.ask() == b""
        assert listener.refused == []


async def dripped(listener: Listener, begin: bytes, drip: bytes) -> bytes:
    """The answer to a client that goes on writing until the connection is closed."""
    reader, writer = await listener.open(begin)
    answer = asyncio.create_task(until_closed(reader))  # in time, or it raises TimeoutError
    while not answer.done():
        if not writer.is_closing():  # uvloop refuses to write to a closed connection
            writer.write(drip)
        await asyncio.sleep(0.02)
    return await answer


@pytest.mark.parametrize(
    ("begin", "drip", "code"),
    [
        (b"GET / HTTP/1.1\r\nx: ", b"a", "headers_too_slow"),  # what arrives does not move the deadline
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc", b"", "body_too_slow"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;", b"e", "body_too_slow"),
    ],
)
async def test_a_slow_writer(begin: bytes, drip: bytes, code: str):
    async with listening(header_timeout_s=0.3, body_gap_timeout_s=0.3) as listener:
        assert refusal(await dripped(listener, begin, drip)) == (408, code)
        assert listener.seen == []


async def test_a_slow_reader_loses_its_answer_and_one_that_reads_on_does_not():
    async with listening(read_timeout_s=0.4) as listener:
        listener.connected(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n", buffer_bytes=4096)
        await until(lambda: len(listener.connections) == 1)
        await until(lambda: len(listener.connections) == 0)
        reader, _ = await listener.open(b"GET /large HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        num_bytes, began = 0, time.monotonic()
        while part := await reader.read(256 * 1024):  # 16 MiB take longer than the timeout
            num_bytes += len(part)
            await asyncio.sleep(0.01)
        assert num_bytes > 16 * 2**20
        assert time.monotonic() - began > 0.5


@pytest.mark.slow
async def test_an_idle_client_that_has_not_read_its_last_answer_is_ended():
    """Too little is left for it to count as a slow reader, and closing would wait until it has read that."""
    async with listening(idle_timeout_s=4.0) as listener:
        lazy = listener.connected(buffer_bytes=4096)
        await until(lambda: len(listener.connections) == 1)
        (connection,) = listener.connections._open
        num_left = 0
        while not num_left:
            num_seen = len(listener.seen)
            await asyncio.get_running_loop().sock_sendall(lazy, b"GET /some HTTP/1.1\r\nhost: x\r\n\r\n")
            await until(lambda wanted=num_seen + 1: len(listener.seen) == wanted)
            await asyncio.sleep(0.005)
            num_left = connection.transport.get_write_buffer_size()
        assert num_left < 64 * 1024
        assert not connection.can_make_way
        await until(lambda: len(listener.connections) == 0)


async def test_what_comes_after_an_answer_that_did_not_wait_for_it_ends_too():
    """A body that nobody reads: the answer has gone out, and the client goes on sending for ever."""

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        scope[SCOPE_KEY].whole(413, b"", {})

    async with listening(body_gap_timeout_s=0.3) as listener:
        listener.app = app  # type: ignore[method-assign]
        begin = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
        assert (await dripped(listener, begin, b"a")).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_address"])
async def test_connections_with_requests_are_kept_and_others_make_way(limit: str):
    async with listening(**{limit: 4}) as listener:
        busy = [await listener.open(LAST_WAIT) for _ in range(3)]
        await until(lambda: len(listener.seen) == 3)
        idle, _ = await listener.open()
        await until(lambda: len(listener.connections) == 4)
        assert (await listener.ask(LAST_GET)).startswith(b"HTTP/1.1 200")
        assert await until_closed(idle) == b""
        busy.append(await listener.open(LAST_WAIT))  # the fourth with a request
        await until(lambda: len(listener.seen) == 5)
        assert refusal(await listener.ask()) == (503, "too_many_connections")
        listener.may_answer.set()
        for reader, _ in busy:
            assert (await until_closed(reader)).endswith(b"/wait")


# ---- at the limit, a refusal costs no look at those that are open ---------------------------------------------------

OPEN = 3000


class Busy:
    """A connection with a request in flight, until it is idle."""

    address = "10.0.0.1"
    deadline = math.inf
    is_idle = made_way = False
    num_looks = 0

    @property
    def can_make_way(self) -> bool:
        self.num_looks += 1
        return self.is_idle

    def make_way(self) -> None:
        self.made_way = True


@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_address"])
def test_refused_connections_look_at_the_open_ones_once(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    loop = SimpleNamespace(time=lambda: clock.now, call_later=lambda *_: None)
    monkeypatch.setattr(connections_module.asyncio, "get_running_loop", lambda: loop)
    connections = ClientConnections(ConnectionLimits(**{limit: OPEN}))
    open_ones = [Busy() for _ in range(OPEN)]
    assert all(connections.add(each) for each in open_ones)
    assert not any(connections.add(Busy()) for _ in range(OPEN))
    assert sum(each.num_looks for each in open_ones) == OPEN
    open_ones[7].is_idle = True
    clock.now += connections_module._BUSY_S
    assert connections.add(Busy())
    assert open_ones[7].made_way
    assert len(connections) == OPEN
