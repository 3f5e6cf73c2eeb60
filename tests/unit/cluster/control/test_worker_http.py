"""An agent's pages among clients that say nothing, or too slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from cluster.control import http
from cluster.control.http import serve_worker_http
from process.free_ports import free_port

Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run(scenario: Callable[[Callable[[bytes], Coroutine[Any, Any, Opened]]], Coroutine[Any, Any, None]]) -> None:
    port = free_port()
    worker = SimpleNamespace(
        name="w", registry=CollectorRegistry(), worker=SimpleNamespace(host="127.0.0.1", metrics_port=port)
    )

    async def opened(first: bytes) -> Opened:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first)
        return reader, writer

    async def scene() -> None:
        async with asyncio.timeout(120), serve_worker_http(worker):  # type: ignore[arg-type]
            await scenario(opened)

    uvloop.run(scene())


HALF = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: "
WHOLE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


def test_silent_and_half_sent_connections_are_closed_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "_CONNECTION_S", 0.2)
    monkeypatch.setattr(http, "_SWEEP_S", 0.05)

    async def scenario(opened: Callable[[bytes], Coroutine[Any, Any, Opened]]) -> None:
        held = [await opened(first) for first in (b"", HALF) * 3]
        assert await asyncio.gather(*[until_closed(reader) for reader, _ in held]) == [b""] * 6
        for _, writer in held:
            writer.close()

    run(scenario)


def test_the_oldest_connection_makes_way_and_pages_are_served(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "_MAX_CONNECTIONS", 3)
    monkeypatch.setattr(http, "_CONNECTION_S", 600.0)

    async def scenario(opened: Callable[[bytes], Coroutine[Any, Any, Opened]]) -> None:
        first = await opened(HALF)
        others = [await opened(b"") for _ in range(2)]
        reader, writer = await opened(WHOLE)
        answer = await until_closed(reader)  # the server closes it: one answer for each connection
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b'{"status": "alive", "worker": "w"}')
        assert await until_closed(first[0]) == b""
        for _, each in (first, *others, (reader, writer)):
            each.close()

    run(scenario)
