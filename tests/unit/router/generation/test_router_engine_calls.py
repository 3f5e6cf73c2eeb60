"""An engine's stream arrives in any pieces; its events are handed on whole, in order, and only once."""

import asyncio
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.router_stand_ins import EngineStandIn, until

from process.tracing.span import NO_SPAN
from router.fleet.fleet_state import WorkerView
from router.fleet.worker_loads import WorkerLoads
from router.generation import engine_calls
from router.generation.engine_calls import EngineCall, Engines
from router.http.engine_connections import EngineConnection, EngineConnections
from router.metrics import Metrics

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
ONE, TWO = b"data: 1\n\n", b"data: 1\n\n" * 2


class Transport:
    """Takes what is written and sends nothing."""

    is_closed = False

    def get_extra_info(self, name: str) -> Any:
        return SimpleNamespace(setsockopt=lambda *_: None) if name == "socket" else None

    def write(self, data: bytes) -> None: ...
    def is_reading(self) -> bool:
        return True

    def abort(self) -> None:
        self.is_closed = True


class Stream:
    """One streamed call whose bytes the test feeds. Everything that it delivers is in `delivered`."""

    def __init__(self, deliver: Callable[[bytes], None] | None = None) -> None:
        connections = EngineConnections(connect_timeout_s=1, idle_s=1, most=9)
        self.connection, self.transport = EngineConnection(connections, "http://x:1", ""), Transport()
        self.connection.connection_made(self.transport)
        connections.put(self.connection)
        engines: Any = SimpleNamespace(connections=connections, abort=lambda *_: None)
        in_flight = WorkerLoads().add("d0")
        worker = WorkerView("d0", "decode", engine_url="http://x:1")
        self.call = EngineCall(engines, worker, "/", b"{}", "rid", in_flight, NO_SPAN)
        self.call.start(wants_stream=True)
        self.delivered: list[bytes] = []
        self._deliver = deliver or self.delivered.append
        self._ended: asyncio.Future[None] | None = None

    def feed(self, data: bytes) -> None:
        self.connection.data_received(data)
        if self._ended is None and self.call.output.done():
            self.delivered.append(self.call.output.result())
            self._ended = self.call.relay(self._deliver)

    async def end(self) -> None:
        """Raises what ended the stream too early; there is nothing to wait for."""
        assert self._ended.done()
        self._ended.result()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def cut(draw: Callable, data: bytes, most: int) -> list[bytes]:
    places = sorted(draw(st.sets(st.integers(1, len(data) - 1), max_size=most))) if len(data) > 1 else []
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


EVENTS = st.lists(
    st.sampled_from([b"data: {}\n\n", b"data: a\r\n\n\n", b'data: {"x":"' + b"y" * 300 + b'"}\n\n', b"\n\n"])
)


@st.composite
def pieces(draw: Callable) -> tuple[bytes, list[bytes]]:
    """Events, and an answer with them in any chunks that arrive in any pieces; often one event, chunk and piece."""
    events = [*draw(EVENTS), DONE]
    parts = events if draw(st.booleans()) else cut(draw, b"".join(events), 6)
    chunks = [HEAD, *map(chunk, parts), b"0\r\n\r\n"]
    found = []
    for each in chunks:
        found += [each] if draw(st.integers(0, 3)) else cut(draw, each, 3)
    if not draw(st.integers(0, 3)):
        found = [b"".join(found[i : i + 2]) for i in range(0, len(found), 2)]
    return b"".join(events), found


@given(pieces())
@example((TWO + b"\n\n" + DONE, [HEAD, *map(chunk, [ONE, ONE, b"\n", b"\n" + DONE]), b"0\r\n\r\n"]))
@example((TWO + ONE + DONE, [HEAD, *map(chunk, [ONE, ONE, ONE]), chunk(DONE) + b"0\r\n\r\n"]))
def test_every_event_is_delivered_once_and_whole(answer: tuple[bytes, list[bytes]]) -> None:
    events, arriving = answer

    async def scenario() -> None:
        stream = Stream()
        for piece in arriving:
            stream.feed(piece)
        await stream.end()
        assert b"".join(stream.delivered) == events
        assert all(each.endswith(b"\n\n") for each in stream.delivered)
        assert not stream.transport.is_closed

    asyncio.run(scenario())


@pytest.mark.parametrize("wrong", [b"zz\r\nx\n\n\r\n", b"4\r\ndata: a\n\n\r\n", b"\r\n\n\n\r\n"])
async def test_what_is_no_chunk_breaks_the_stream(wrong: bytes) -> None:
    stream = Stream()
    for piece in (HEAD, chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n"), wrong):
        stream.feed(piece)
    with pytest.raises(Exception, match="broke"):
        await stream.end()
    assert stream.delivered == [b"data: 1\n\n", b"data: 2\n\n"]
    assert stream.transport.is_closed


async def test_an_error_of_the_reader_ends_the_stream() -> None:
    def deliver(events: bytes) -> None:
        if b"3" in events:
            raise KeyError("mine")

    stream = Stream(deliver)
    for number in b"123":
        stream.feed((b"" if number != ord("1") else HEAD) + chunk(b"data: %c\n\n" % number))
    with pytest.raises(KeyError, match="mine"):
        await stream.end()
    assert stream.transport.is_closed


async def test_an_error_that_nobody_foresaw_ends_the_call() -> None:
    """While it connects, nobody else would."""

    def tls(_: WorkerView) -> None:
        raise ValueError("nobody foresaw this")

    engines: Any = SimpleNamespace(
        connections=EngineConnections(connect_timeout_s=1, idle_s=1, most=9), abort=lambda *_: None, tls=tls
    )
    worker = WorkerView("d0", "decode", engine_url="http://x:1")
    call = EngineCall(engines, worker, "/", b"{}", "rid", WorkerLoads().add("d0"), NO_SPAN)
    call.start()
    with pytest.raises(ValueError, match="nobody foresaw this"):
        await asyncio.wait_for(call.output, 120)
    call.leave()


async def test_aborts_at_an_engine_that_hangs_keep_those_at_others_waiting_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They had all slots for as long as an abort may take, and the others' time was over before their turn."""
    monkeypatch.setattr(engine_calls, "_ABORT_TIMEOUT_S", 60.0)
    silent: list[asyncio.StreamWriter] = []

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.append(writer)

    healthy = EngineStandIn("decode")
    await healthy.start()
    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Engines(Metrics(), connect_timeout_s=60, max_connections=9).open() as engines:
            for number in range(150):
                engines.abort(WorkerView("d0", "decode", engine_url=url), f"r{number}")
            await until(lambda: silent)
            engines.abort(WorkerView("d1", "decode", engine_url=healthy.url), "other")
            await until(lambda: healthy.aborted)
            server.close()
            while engines._aborts:
                for writer in silent:
                    writer.transport.abort()
                await asyncio.sleep(0.02)
            gc.collect()  # tracebacks of the last ones
            assert not engines._abort_slots
    await healthy.stop()
