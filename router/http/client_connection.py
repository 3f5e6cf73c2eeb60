"""The way back to a client. uvicorn's protocol reads requests; answers are written straight to the transport.

ASGI would cost a message, several coroutines and a task's step per event. What uvicorn's code relies on is kept: its
`RequestResponseCycle` knows whether the response has begun and ended, so keep-alive, pipelining and shutdown work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

SCOPE_KEY = "prelude.client"  # in the ASGI scope: the request's ClientConnection


class Source(Protocol):
    """What feeds an answer, and waits while its client does not read."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class ClientConnection:
    """One request's way back to its client."""

    def __init__(self, protocol: ClientProtocol) -> None:
        self.is_lost = False
        self.cycle: Any = None  # uvicorn's state of this request and its response
        self._protocol = protocol
        self.transport = protocol.transport
        self._sources: list[Source] = []
        self._on_lost: Callable[[], None] | None = None

    @contextmanager
    def watched(self, on_lost: Callable[[], None]) -> Iterator[None]:
        """Inside, a client that leaves is reported, once."""
        self._protocol.answering, self._on_lost = self, on_lost
        if self.transport.is_closing() or self.cycle.disconnected:
            self.lost()
        try:
            yield
        finally:
            self._on_lost = None

    @contextmanager
    def fed_by(self, source: Source) -> Iterator[None]:
        """Inside, the source pauses while more is buffered for the client than the transport's high-water mark."""
        self._sources.append(source)
        if self._protocol.flow.write_paused:
            source.pause_reading()
        try:
            yield
        finally:
            self._sources.remove(source)

    def start(self, headers: Mapping[str, str], data: bytes) -> None:
        """Begin an answer without a known length: its head, for a 200, and its first part."""
        self._write(self._head(200, headers, None) + b"%x\r\n%b\r\n" % (len(data), data))

    def write(self, data: bytes) -> None:
        """Send a part of an answer without a known length."""
        if not self.is_lost:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self, data: bytes = b"") -> None:
        """Send the last part of an answer without a known length."""
        self._end(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n")

    def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send an answer in one piece."""
        self._end(self._head(status, headers, len(body)) + body)

    async def is_drained(self, timeout_s: float) -> bool:
        """Whether the client reads, within that time, until no more than the low-water mark is buffered."""
        flow = self._protocol.flow
        if not flow.write_paused:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await flow.drain()
        except TimeoutError:
            return False
        return True

    def abort(self) -> None:
        """Close the connection and drop what is buffered for the client."""
        self.transport.abort()

    # ---- called by the protocol ---------------------------------------------------------------------------------

    def pause(self) -> None:
        for source in self._sources:
            source.pause_reading()

    def resume(self) -> None:
        for source in self._sources:
            source.resume_reading()

    def lost(self) -> None:
        self.is_lost = True
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost()

    def _head(self, status: int, headers: Mapping[str, str], length: int | None) -> bytes:
        cycle = self.cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        pairs = [*cycle.default_headers, *((name.encode(), value.encode("latin-1")) for name, value in headers.items())]
        pairs.append((b"transfer-encoding", b"chunked") if length is None else (b"content-length", b"%d" % length))
        if not cycle.keep_alive:
            pairs.append((b"connection", b"close"))
        lines = [b"%b: %b\r\n" % pair for pair in pairs]
        head = b"".join((STATUS_LINE[status], *lines, b"\r\n"))
        if head.count(b"\r") != len(lines) + 2 or head.count(b"\n") != len(lines) + 2:
            raise ValueError(f"a header has a line break: {dict(headers)!r}")
        return head

    def _write(self, data: bytes) -> None:
        if not self.is_lost:
            self.transport.write(data)

    def _end(self, data: bytes) -> None:
        """As uvicorn ends a response."""
        cycle = self.cycle
        self._write(data)
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()


class ClientProtocol(HttpToolsProtocol):
    """uvicorn's protocol for one connection, which gives each request its ClientConnection in the scope."""

    answering: ClientConnection | None = None  # the request whose answer is being made; later ones of a pipeline wait

    def on_headers_complete(self) -> None:
        connection = ClientConnection(self)
        self.scope[SCOPE_KEY] = connection  # type: ignore[literal-required]
        super().on_headers_complete()  # starts the request's task, which runs later
        connection.cycle = self.cycle

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.answering is not None:
            self.answering.lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.answering is not None:
            self.answering.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.answering is not None:
            self.answering.resume()
