"""Closed-loop HTTP load at the level of a protocol, so that little of a shared machine's CPU is the client's."""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httptools

from bench.errors import SystemFailed, WrongAnswer

_LAST_EVENT = b"data: [DONE]\n\n"
_MAX_SHOWN = 300  # bytes of an answer in an error's message


@dataclass
class HttpLoad:
    """The answers to a load. Times in seconds, one per request, in the order of the answers."""

    first_s: list[float] = field(default_factory=list)  # until the first event, or the whole answer without a stream
    num_events: int = 0  # with each stream's last one
    duration_s: float = 0.0


async def http_load(
    port: int,
    request: bytes,
    num_requests: int,
    concurrency: int,
    *,
    num_events: int,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
    spread_s: float = 0.0,
    on_connected: Callable[[], None] = lambda: None,
) -> HttpLoad:
    """Send `num_requests` times the same request to 127.0.0.1, each connection one after the other.

    The connections begin at the same moment, or spread evenly over `spread_s` seconds. `on_connected` is called when
    all connections are open, before the first request. Every answer must be a 200: with a
    stream of `num_events` events and [DONE] or, if that is 0, whole. Raises WrongAnswer, or SystemFailed if a
    connection breaks or the time is up.
    """
    load = HttpLoad()
    todo = iter(range(num_requests))
    loop = asyncio.get_running_loop()
    connections = []
    began_at = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            for _ in range(concurrency):
                _, connection = await loop.create_connection(
                    lambda: _Connection(load, todo, request, num_events), "127.0.0.1", port, ssl=tls
                )
                connections.append(connection)
            on_connected()
            began_at = time.perf_counter()
            for index, connection in enumerate(connections):
                if spread_s:
                    loop.call_later(spread_s * index / concurrency, connection.send_next)
                else:
                    connection.send_next()
            await asyncio.gather(*(connection.done for connection in connections))
    except TimeoutError:
        raise SystemFailed(f"{len(load.first_s)} of {num_requests} answers within {timeout_s:g} s") from None
    except OSError as error:
        raise SystemFailed(f"port {port}: {error}") from error
    finally:
        for connection in connections:
            connection.close()
    load.duration_s = time.perf_counter() - began_at
    return load


class _Connection(asyncio.Protocol):
    """One client. `done` is set when there are no requests left, or fails."""

    def __init__(self, load: HttpLoad, todo: Iterator[int], request: bytes, num_events: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._load = load
        self._todo = todo
        self._request = request
        self._num_events = num_events
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:  # uvloop's is no subclass of asyncio.Transport
        self._transport = transport
        self._acknowledge_at_once()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(SystemFailed(f"a connection ended before its answer: {error or 'closed by the server'}"))

    def send_next(self) -> None:
        """Send the next request, if one is left and the load has not failed meanwhile."""
        if self.done.done():
            return
        if next(self._todo, None) is None:
            self.done.set_result(None)
            return
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)

    def close(self) -> None:
        if not self.done.done():
            self.done.cancel()
        elif not self.done.cancelled():
            self.done.exception()  # retrieved: another connection's error is the one that is raised
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._acknowledge_at_once()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(WrongAnswer(f"not HTTP: {error}: {data[:_MAX_SHOWN]!r}"))

    def _acknowledge_at_once(self) -> None:
        """Linux delays it by 40 ms, for which servers wait that use Nagle's algorithm. The option does not last."""
        assert self._transport is not None
        self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def on_body(self, body: bytes) -> None:
        if not self._body:
            self._load.first_s.append(time.perf_counter() - self._sent_at)
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        status, num_events = self._parser.get_status_code(), body.count(b"data: ")
        is_whole = status == 200 and (not self._num_events or body.endswith(_LAST_EVENT))
        if not is_whole or num_events != (self._num_events and self._num_events + 1):
            self._fail(WrongAnswer(f"status {status}, {num_events} events: {body[:_MAX_SHOWN]!r}"))
            return
        self._load.num_events += num_events
        self.send_next()

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
