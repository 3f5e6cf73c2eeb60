"""All client connections to one listener: limits on their number and on the time without progress; writing of answers.

Answers are written straight to the transport: ASGI would cost a message, several coroutines and a task step per event.
The state that uvicorn relies on is maintained: its `RequestResponseCycle` knows whether the response has begun and
ended, so keep-alive, pipelining and shutdown work.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, Self

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from cluster.config.router import RouterConfig

_MOST_SWEEP_S = 1.0
_BEYOND_STREAMS_S = 10.0
_BUSY_S = 0.05  # after a look at all connections found none idle, more newcomers are refused without another look
_LAST_REQUESTS_S = 1.0  # after the listener has closed, for requests that were sent before


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one connection, and of all together."""

    max_connections: int = 10_000
    max_connections_per_address: int = 4_096
    max_header_bytes: int = 64 * 1024  # of a request: its line, its headers, and what frames its body
    max_headers: int = 128
    max_target_bytes: int = 8 * 1024  # path and query
    max_pipelined: int = 16  # requests that wait for the one before
    header_timeout_s: float = 20.0  # from a request's first byte, or a new connection, to the end of its headers
    body_gap_timeout_s: float = 30.0  # without any of a request's body
    idle_timeout_s: float = 75.0  # between requests
    read_timeout_s: float = 130.0  # for a client to read 64 KiB more of its answer, or the rest

    @classmethod
    def of(cls, config: RouterConfig) -> Self:
        """The limits of cluster.yaml. `read_timeout_s` covers all answers; streams also have a shorter deadline."""
        http = config.http
        return cls(
            max_connections=http.max_connections,
            max_connections_per_address=http.max_connections_per_address,
            idle_timeout_s=http.idle_timeout_s,
            read_timeout_s=config.event_gap_timeout_s + _BEYOND_STREAMS_S,
        )

    @property
    def sweep_s(self) -> float:
        """How often deadlines are checked."""
        shortest = min(self.header_timeout_s, self.body_gap_timeout_s, self.idle_timeout_s, self.read_timeout_s)
        return min(_MOST_SWEEP_S, shortest / 4)


class Refusal(Enum):
    """Why a connection is closed: HTTP status, error code, message."""

    MALFORMED = (400, "invalid_http", "this is not HTTP/1.1")
    NOT_ONE_HOST = (400, "invalid_http", "a request has one host header")
    HEADERS_TOO_LARGE = (431, "headers_too_large", "the request's headers are larger, or more, than this router takes")
    TARGET_TOO_LONG = (414, "target_too_long", "the request's path and query are longer than this router takes")
    TOO_MANY_PIPELINED = (429, "too_many_pipelined", "too many requests wait on this connection")
    HEADERS_TOO_SLOW = (408, "headers_too_slow", "the request's headers did not arrive in time")
    BODY_TOO_SLOW = (408, "body_too_slow", "the request's body has stopped arriving")
    TOO_MANY_CONNECTIONS = (503, "too_many_connections", "this router has too many connections; try again")

    @property
    def answer(self) -> bytes:
        """The whole answer, after which the connection is closed."""
        status, code, message = self.value
        kind = "invalid_request_error" if status < 500 else "server_error"
        body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})
        retry = b"retry-after: 1\r\n" if status in (429, 503) else b""
        return (
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n%b"
            % (status, code.replace("_", " ").encode(), len(body), retry, body)
        )


class Connection(Protocol):
    """One connection, as `ClientConnections` sees it."""

    address: str
    deadline: float  # by the loop's clock; infinite while nothing is expected of the client

    @property
    def can_make_way(self) -> bool: ...
    def make_way(self) -> None: ...
    def out_of_time(self) -> None: ...


class ClientConnections:
    """Counts connections and ends those whose deadline has passed. One per listener and process."""

    def __init__(self, limits: ConnectionLimits | None = None, on_refused: Callable[[str], None] | None = None) -> None:
        self.limits = limits or ConnectionLimits()
        self._on_refused = on_refused
        self._open: dict[Connection, None] = {}  # the longest open first
        self._by_address: Counter[str] = Counter()
        self._all_busy_until: dict[str | None, float] = {}  # by address; None: all addresses
        self._sweep: asyncio.TimerHandle | None = None
        self.last_request_at = math.inf  # by the loop's clock, when requests must be complete: the listener closes

    @property
    def is_stopping(self) -> bool:
        return self.last_request_at < math.inf

    def stop(self) -> None:
        """The listener closes: each connection may have one more request, if it comes at once. Idempotent."""
        if not self.is_stopping:
            self.last_request_at = asyncio.get_running_loop().time() + _LAST_REQUESTS_S

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> bool:
        """Add a connection, closing the oldest idle one if there are too many; False if none is idle."""
        limits, address = self.limits, connection.address
        if self._by_address[address] >= limits.max_connections_per_address:
            return self._make_room(connection, address) and self._add(connection)
        if len(self._open) >= limits.max_connections:
            return self._make_room(connection, None) and self._add(connection)
        return self._add(connection)

    def remove(self, connection: Connection) -> None:
        """Forget a connection. Idempotent."""
        if connection in self._open:
            del self._open[connection]
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]

    def refused(self, why: Refusal) -> None:
        """Count a refusal."""
        if self._on_refused is not None:
            self._on_refused(why.value[1])

    def _add(self, connection: Connection) -> bool:
        self._open[connection] = None
        self._by_address[connection.address] += 1
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self.limits.sweep_s, self._end_late)
        return True

    def _make_room(self, newcomer: Connection, address: str | None) -> bool:
        now = asyncio.get_running_loop().time()
        if now >= self._all_busy_until.get(address, now):
            for connection in self._open:
                if connection.can_make_way and address in (None, connection.address):
                    self.remove(connection)
                    connection.make_way()
                    return True
            self._all_busy_until[address] = now + _BUSY_S
        if not self._by_address[newcomer.address]:
            del self._by_address[newcomer.address]
        return False

    def _end_late(self) -> None:
        loop = asyncio.get_running_loop()
        now, self._sweep = loop.time(), None
        self._all_busy_until.clear()
        for connection in [each for each in self._open if each.deadline <= now]:
            connection.out_of_time()
        if self._open:
            self._sweep = loop.call_later(self.limits.sweep_s, self._end_late)


class Source(Protocol):
    """The source of an answer's events, which can be paused while the client does not read."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class ClientConnection:
    """Writes the answer to one request."""

    def __init__(self, protocol: Any) -> None:
        """`protocol`: the ClientProtocol, which reads the connection's requests."""
        self.is_lost = False
        self.cycle: Any = None  # uvicorn's state of this request and its response
        self._protocol = protocol
        self.transport = protocol.transport
        self._sources: list[Source] = []
        self._on_lost: Callable[[], None] | None = None

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Report a client that leaves, once, until `unwatch`."""
        self._protocol.answering, self._on_lost = self, on_lost
        self._protocol.flow.resume_reading()  # paused since the last part of a long body; else nobody sees it leave
        if self.transport.is_closing() or self.cycle.disconnected:
            self.lost()

    def unwatch(self) -> None:
        self._on_lost = None

    @property
    def arrived_body(self) -> bytes | None:
        """The request's body if all of it is here, and nobody has begun to receive it."""
        cycle = self.cycle
        if cycle.more_body or cycle.disconnected or cycle.response_complete:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    @contextmanager
    def fed_by(self, source: Source) -> Iterator[None]:
        """Inside the block, the source is paused while the client's buffer is above the transport's high-water mark."""
        self._sources.append(source)
        if self._protocol.flow.write_paused:
            source.pause_reading()
        try:
            yield
        finally:
            self._sources.remove(source)

    def start(self, headers: Mapping[str, str], data: bytes) -> None:
        """Begin an answer of unknown length: send the head of a 200 and the first part."""
        self._write(self._head(200, headers, None) + b"%x\r\n%b\r\n" % (len(data), data))

    def end(self, data: bytes = b"") -> None:
        """Send the last part of an answer of unknown length."""
        self._end(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n")

    def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send an answer in one piece."""
        self._end(self._head(status, headers, len(body)) + body)

    async def is_drained(self, timeout_s: float) -> bool:
        """Wait until no more than the low-water mark is buffered; False if that takes longer."""
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
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode("latin-1")
        if lines.count(b"\r") != len(headers) or lines.count(b"\n") != len(headers):
            raise ValueError(f"a header has a line break: {dict(headers)!r}")
        defaults = b"".join([b"%b: %b\r\n" % pair for pair in cycle.default_headers])
        framing = b"transfer-encoding: chunked\r\n" if length is None else b"content-length: %d\r\n" % length
        close = b"" if cycle.keep_alive else b"connection: close\r\n"
        return b"%b%b%b%b%b\r\n" % (STATUS_LINE[status], defaults, lines, framing, close)

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
