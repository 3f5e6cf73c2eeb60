"""An agent's pages among clients that say nothing, or too slowly."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from cluster.control.http import serve_worker_http
from process import status_pages
from process.free_ports import free_port

Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def serving() -> AsyncIterator[Callable[[bytes], Awaitable[Opened]]]:
    """An agent's pages, and what opens a connection to them that begins with these bytes."""
    port = free_port()
    worker = SimpleNamespace(
        name="w", registry=CollectorRegistry(), worker=SimpleNamespace(host="127.0.0.1", metrics_port=port)
    )

    async def opened(first: bytes) -> Opened:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first)
        return reader, writer

    async with asyncio.timeout(120), serve_worker_http(worker):  # type: ignore[arg-type]
        yield opened


HALF = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: "
WHOLE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_silent_and_half_sent_connections_are_closed_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(status_pages, "_CONNECTION_S", 0.2)
    monkeypatch.setattr(status_pages, "_SWEEP_S", 0.05)

    async with serving() as opened:
        held = [await opened(first) for first in (b"", HALF) * 3]
        assert await asyncio.gather(*[until_closed(reader) for reader, _ in held]) == [b""] * 6
        for _, writer in held:
            writer.close()


async def test_the_oldest_connection_makes_way_and_pages_are_served(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(status_pages, "_MAX_CONNECTIONS", 3)
    monkeypatch.setattr(status_pages, "_CONNECTION_S", 600.0)

    async with serving() as opened:
        first = await opened(HALF)
        others = [await opened(b"") for _ in range(2)]
        reader, writer = await opened(WHOLE)
        answer = await until_closed(reader)  # the server closes it: one answer for each connection
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b'{"status": "alive", "worker": "w"}')
        assert await until_closed(first[0]) == b""
        for _, each in (first, *others, (reader, writer)):
            each.close()
