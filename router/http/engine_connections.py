"""Connections to engines' HTTP servers. Bytes are parsed in the callback that receives them, without a task or a queue.

A connection carries one exchange (a request and its response) at a time, and is idle in between.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools

# TCP notices a dead peer, or a cut network, within 15 s: by probes, or in milliseconds by what it has not confirmed.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15_000))
_NO_HEADERS: Mapping[str, str] = {}
_HEAD = b"POST %b HTTP/1.1\r\nhost: %b\r\naccept: */*\r\ncontent-type: application/json\r\n%bcontent-length: "
_REQUEST = b"%b%d\r\n%b\r\n%b"


Tls = Callable[[], tuple[ssl.SSLContext, str]]  # for a handshake now: the context, and the name that the peer must have


class Exchange(Protocol):
    """Callbacks for one request. httptools calls all but the last one; an error in them breaks the connection."""

    # Set while the parser is between two chunks, it takes the content of one that arrives in a piece of its own.
    on_chunk: Callable[[bytes], None] | None

    def on_headers_complete(self) -> None: ...
    def on_body(self, data: bytes) -> None: ...
    def on_message_complete(self) -> None: ...
    def on_broken(self, error: BaseException) -> None: ...  # the connection, or one of the above


class EngineConnections:
    """The idle connections to all engines, by base URL. A busy connection belongs to its exchange.

    There are at most `most` of both: a new one takes the place of the idle one that was used longest ago.
    """

    def __init__(self, *, connect_timeout_s: float, idle_s: float, most: int) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._most = most
        self._open: set[EngineConnection] = set()  # also those that are being made
        self._idle: dict[str, list[EngineConnection]] = {}  # the one that was used last is at the end
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    def take(self, url: str, key: str = "") -> EngineConnection | None:
        """An idle connection that is recent enough to reuse, or None. `key`: the engine's."""
        idle = self._idle.get(url)
        while idle:
            connection = idle.pop()
            if connection.key == key:
                return connection
            connection.close()  # of an engine that was there before
        return None

    async def connect(self, url: str, key: str = "", tls: Tls | None = None) -> EngineConnection:
        """A new connection. Raises OSError, with EMFILE for one too many, and TimeoutError if nobody answers.

        `key`: the bearer token of its requests. `tls`: for an address with https. ssl.SSLError is an OSError.
        """
        self._make_room()
        connection = EngineConnection(self, url, key)
        self._open.add(connection)
        try:
            await self._connect(connection, tls)
        except BaseException:
            self._open.discard(connection)
            raise
        return connection

    async def _connect(self, connection: EngineConnection, tls: Tls | None) -> None:
        url = connection.url
        async with asyncio.timeout(self._connect_timeout_s):
            is_https, host, port = _address(url)
            context = server = None
            if is_https:
                if tls is None:
                    raise ConnectionError(f"{url} wants TLS, and cluster.yaml has no `tls`")
                context, server = tls()
            await asyncio.get_running_loop().create_connection(
                lambda: connection, host, port, ssl=context, server_hostname=server
            )

    def put(self, connection: EngineConnection) -> None:
        """Keep a connection that has become idle."""
        if self._is_closed:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.idle_until = loop.time() + self._idle_s
        self._idle.setdefault(connection.url, []).append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self._idle_s, self._close_old)

    def discard(self, connection: EngineConnection) -> None:
        """Forget a connection that was closed."""
        self._open.discard(connection)
        idle = self._idle.get(connection.url, [])
        if connection in idle:
            idle.remove(connection)

    def close(self) -> None:
        """Close all idle connections, and others as soon as they become idle."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for idle in self._idle.values():
            for connection in tuple(idle):
                connection.close()

    def __len__(self) -> int:
        return len(self._open)

    def _make_room(self) -> None:
        if len(self._open) < self._most:
            return
        idle = min((each for each in self._idle.values() if each), key=lambda each: each[0].idle_until, default=None)
        if idle is None:
            raise OSError(errno.EMFILE, f"all {self._most} connections to engines are in use")
        oldest = idle.pop(0)
        oldest.close()
        self._open.discard(oldest)

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        now, self._sweep = loop.time(), None
        for url, idle in tuple(self._idle.items()):
            while idle and idle[0].idle_until <= now:
                idle.pop(0).close()
            if not idle:
                del self._idle[url]
        if self._idle:
            next_s = min(idle[0].idle_until for idle in self._idle.values())
            self._sweep = loop.call_at(next_s, self._close_old)


class EngineConnection(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, connections: EngineConnections, url: str, key: str) -> None:
        self.url = url
        self.key = key
        self._authorization = b"authorization: Bearer %b\r\n" % key.encode() if key else b""
        self.idle_until = 0.0
        self._connections = connections
        self._heads: dict[str, bytes] = {}  # by path, until the length; paths are few
        self._exchange: Exchange | None = None
        self._is_lost = False

    def send(
        self,
        path: str,
        body: bytes | tuple[bytes | memoryview, ...],
        exchange: Exchange,
        more: Mapping[str, str] = _NO_HEADERS,
    ) -> None:
        """Send a request with more headers; its response goes to the exchange, which calls `finish` or `close`.

        A body in parts is not joined: uvloop keeps references to parts that the socket does not accept immediately.
        """
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(exchange)
        if self._is_lost:  # since it was taken or made
            asyncio.get_running_loop().call_soon(self.connection_lost, None)
            return
        head = self._heads.get(path)
        if head is None:
            head = self._heads[path] = _HEAD % (path.encode(), _host(self.url), self._authorization)
        lines = "".join([f"{name}: {value}\r\n" for name, value in more.items()]).encode() if more else b""
        if isinstance(body, bytes):
            self._transport.write(_REQUEST % (head, len(body), lines, body))
        else:
            self._transport.writelines([_REQUEST % (head, sum(map(len, body)), lines, b""), *body])

    @property
    def status(self) -> int:
        """The response's status, once its head has arrived."""
        return self._parser.get_status_code()

    def finish(self) -> None:
        """The response is complete: the connection is idle, unless the engine closes it."""
        self._exchange = None
        if self._parser.should_keep_alive():
            self.resume_reading()  # the answer's end may have come with the bytes that made its reader pause
            self._connections.put(self)
        else:
            self.close()

    def close(self) -> None:
        """Close immediately, in any state. The exchange gets no more callbacks."""
        self._exchange = None
        self._transport.abort()

    def pause_reading(self) -> None:
        """Stop reading, so that TCP flow control holds the engine back. Idempotent."""
        if self._transport.is_reading():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Idempotent."""
        if not self._is_lost and not self._transport.is_reading():
            self._transport.resume_reading()

    # ---- asyncio's callbacks ------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:  # uvloop's is no subclass of asyncio.Transport
        self._transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # nobody asked
            self._transport.abort()
            return
        if exchange.on_chunk is not None and (content := _chunk_content(data)):
            try:
                exchange.on_chunk(content)
            except Exception as error:  # noqa: BLE001 - the exchange's own, as the parser hands them back
                self._break(error)
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # the exchange's own
            self._break(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._break(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._connections.discard(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.on_broken(error or ConnectionResetError("closed by the engine"))

    def _break(self, error: BaseException) -> None:
        exchange = self._exchange
        self.close()
        if exchange is not None:
            exchange.on_broken(error)


def _chunk_content(data: bytes) -> bytes:
    """The content of `data` if it is exactly one chunk with whole events, else empty.

    The chunk's size must be written as engines write it, so nothing is accepted here that the parser would reject.
    """
    size_end = data.find(b"\r\n")
    content = data[size_end + 2 : -2]
    is_one = data[:size_end] == b"%x" % len(content) and data[-2:] == b"\r\n"
    return content if is_one and content[-2:] == b"\n\n" else b""


@lru_cache(maxsize=4096)
def _address(url: str) -> tuple[bool, str, int]:
    """Whether the URL is HTTPS, its host and its port. Raises ConnectionError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConnectionError(f"{url} is not an address of an engine, http://host:port or https://host:port")
    is_https = parts.scheme == "https"
    return is_https, parts.hostname, parts.port or (443 if is_https else 80)


@lru_cache(maxsize=4096)
def _host(url: str) -> bytes:
    return urlsplit(url).netloc.encode()
