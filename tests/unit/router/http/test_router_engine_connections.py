"""Connections to engines: reused while they are fresh, and never by two exchanges."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import httptools
import pytest
from support.router_stand_ins import eventually

from process.exhaustion import is_exhaustion
from router.http.engine_connections import EngineConnection, EngineConnections

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Exchange:
    """Records what happens to one request."""

    on_chunk = None

    def __init__(self, connection: EngineConnection, fails: bool = False) -> None:
        self.ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._fails = fails
        self._body = b""
        connection.send("/v1/completions", b"{}", self)

    def on_headers_complete(self) -> None: ...

    def on_body(self, data: bytes) -> None:
        if self._fails:
            raise KeyError("mine")
        self._body += data

    def on_message_complete(self) -> None:
        self._connection.finish()
        self.ended.set_result(self._body)

    def on_broken(self, error: BaseException) -> None:
        self.ended.set_exception(error)


@asynccontextmanager
async def an_engine(
    answer: bytes = ANSWER, *, idle_s: float = 5.0, num_answers: int | None = None
) -> AsyncIterator[tuple[EngineConnections, str, list[asyncio.StreamWriter]]]:
    """Connections, and the URL of a server that gives one answer to every request, and closes after `num_answers`.

    Also the connections that the server has accepted.
    """
    accepted: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        try:
            for _ in count() if num_answers is None else range(num_answers):
                await reader.readuntil(b"\r\n\r\n{}")
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    connections = EngineConnections(connect_timeout_s=2, idle_s=idle_s, most=2)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, asyncio.timeout(120):
        yield connections, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", accepted
        connections.close()


async def test_a_fresh_connection_is_used_again() -> None:
    async with an_engine() as (connections, url, accepted):
        connection = await connections.connect(url)
        assert connections.take(url) is None
        assert await Exchange(connection).ended == b"ok"
        assert connections.take(url) is connection
        assert connections.take(url) is None
        assert await Exchange(connection).ended == b"ok"
        assert len(accepted) == 1


CLOSING = ANSWER.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")


@pytest.mark.parametrize(
    ("options", "unasked"),
    [({"idle_s": 0.05}, b""), ({"answer": CLOSING}, b""), ({}, ANSWER)],
    ids=["old", "closed by the engine", "bytes that nobody asked for"],
)
async def test_one_that_is_not_used_again(options: dict[str, Any], unasked: bytes) -> None:
    async with an_engine(**options) as (connections, url, accepted):
        await Exchange(await connections.connect(url)).ended
        accepted[0].write(unasked)
        await accepted[0].wait_closed()
        assert connections.take(url) is None


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", b"\x00\x01\x02"])
async def test_an_exchange_hears_of_a_broken_connection(answer: bytes) -> None:
    async with an_engine(answer, num_answers=1) as (connections, url, _accepted):
        with pytest.raises((OSError, httptools.HttpParserError)):
            await Exchange(await connections.connect(url)).ended


async def test_the_exchanges_own_error_is_handed_back() -> None:
    async with an_engine() as (connections, url, accepted):
        exchange = Exchange(await connections.connect(url), fails=True)
        with pytest.raises(KeyError, match="mine"):
            await exchange.ended
        await accepted[0].wait_closed()


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1:1"])
async def test_an_address_that_nobody_serves_is_an_error(url: str) -> None:
    async with an_engine() as (connections, _, _):
        with pytest.raises(OSError, match=r"127\.0\.0\.1|Connection refused"):
            await connections.connect(url)


async def test_there_are_no_more_than_are_allowed() -> None:
    async with an_engine() as (connections, url, accepted):
        first, second = await connections.connect(url), await connections.connect(url)
        assert len(connections) == 2
        with pytest.raises(OSError, match="all 2 connections") as caught:
            await connections.connect(url)
        assert is_exhaustion(caught.value)
        assert await Exchange(first).ended == await Exchange(second).ended == b"ok"
        third = await connections.connect(url)  # in the place of the first, which has been idle for longer
        assert await Exchange(third).ended == b"ok"
        assert [connections.take(url) for _ in range(3)] == [third, second, None]
        assert len(connections) == 2
        await asyncio.wait_for(accepted[0].wait_closed(), 120)


async def test_one_that_cannot_be_made_takes_no_place() -> None:
    async with an_engine() as (connections, url, _accepted):
        for _ in range(3):
            with pytest.raises(ConnectionError):
                await connections.connect("http://127.0.0.1:1")
        assert len(connections) == 0
        lost = await connections.connect(url)
        lost.close()
        await eventually(lambda: asyncio.sleep(0, len(connections)), lambda number: number == 0)
