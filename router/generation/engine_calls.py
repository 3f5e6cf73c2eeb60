"""HTTP calls to the engines, and aborts of those that are left before their end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from router.errors import AttemptError, WorkerLost
from router.fleet.fleet_state import WorkerView
from router.fleet.in_flight import Hold
from router.fleet.worker_errors import engine_error
from router.metrics import Metrics
from router.protocol.sse import EventSplitter

_KEEP_ALIVE_S = 2.0  # engines close idle connections after 5 s; a call on a closing one would fail
_ABORT_TIMEOUT_S = 5.0
_ABORT_PAUSES_S = (0.0, 0.5)  # twice: an engine ignores the abort of a request that it has not read yet
_MAX_ABORTS = 64  # concurrent; others queue
_JSON = {"content-type": "application/json"}

log = logging.getLogger(__name__)


class Engines:
    """The HTTP connections to all engines."""

    def __init__(self, metrics: Metrics, *, connect_timeout_s: float) -> None:
        self._metrics = metrics
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self._abort_slots = asyncio.Semaphore(_MAX_ABORTS)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Engines]:
        """Keep connections open inside the block. Its end waits, for a bounded time, for pending aborts."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, socket_factory=_socket)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        ) as session:
            self._session = session
            try:
                yield self
            finally:
                if self._aborts:
                    await asyncio.wait(self._aborts, timeout=_ABORT_TIMEOUT_S)

    def call(self, worker: WorkerView, path: str, body: bytes, rid: str, hold: Hold) -> EngineCall:
        """Make a call to one engine without sending it. The call releases `hold` at its end."""
        assert self._session is not None
        return EngineCall(self, self._session, worker, path, body, rid, hold)

    def abort(self, worker: WorkerView, rid: str) -> None:
        """Abort a request at an engine, in the background. Never waits, since failure paths call it."""
        self._metrics.aborts.labels(worker.role).inc()
        task = asyncio.create_task(self._abort(worker, rid), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, worker: WorkerView, rid: str) -> None:
        assert self._session is not None
        body = msgspec.json.encode({"rid": rid})
        for pause_s in _ABORT_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                async with (
                    asyncio.timeout(_ABORT_TIMEOUT_S),
                    self._abort_slots,
                    self._session.post(f"{worker.engine_url}/abort_request", data=body, headers=_JSON),
                ):
                    pass
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                fields = {"worker": worker.name, "rid": rid, "reason": str(error) or type(error).__name__}
                log.info("abort not delivered", extra={"fields": fields})
                return


class EngineCall:
    """One request to one engine. `leave` closes the connection and aborts the request if it is not complete."""

    def __init__(
        self,
        engines: Engines,
        session: aiohttp.ClientSession,
        worker: WorkerView,
        path: str,
        body: bytes,
        rid: str,
        hold: Hold,
    ) -> None:
        self.worker = worker
        self.rid = rid
        self._engines = engines
        self._session = session
        self._url = f"{worker.engine_url}{path}"
        self._body = body
        self._hold = hold
        self._response: aiohttp.ClientResponse | None = None
        self._splitter = EventSplitter()
        self._is_sent = False
        self._is_complete = False

    async def begin(self) -> None:
        """Send the request and wait for the head of a 200. Raises AttemptError."""
        self._is_sent = True
        try:
            self._response = await self._session.post(self._url, data=self._body, headers=_JSON)
            if self._response.status != 200:
                body = await self._response.read()
                self._is_complete = True
                raise engine_error(self._response.status, body, self.worker.name)
        except (aiohttp.ClientError, OSError) as error:
            raise self._connection_error(error) from error

    async def answer(self) -> bytes:
        """The whole answer of a call that is not streamed. Raises AttemptError."""
        await self.begin()
        assert self._response is not None
        try:
            body = await self._response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._connection_error(error) from error
        self._is_complete = True
        return body

    async def events(self) -> bytes | None:
        """The next complete events of a stream that has begun, None at its end. Raises AttemptError."""
        assert self._response is not None
        content = self._response.content
        try:
            while data := await content.readany():
                if events := self._splitter.feed(data):
                    return events
        except (aiohttp.ClientError, OSError) as error:
            raise self._connection_error(error) from error
        self._is_complete = True
        return None

    def fail(self, error: AttemptError) -> None:
        """Make the reader of this call fail with `error` at once."""
        if self._response is not None:
            self._response.content.set_exception(error)

    def leave(self) -> None:
        """End the call in any state. Idempotent; never waits."""
        self._hold.release()
        if self._is_complete or not self._is_sent:
            return
        self._is_sent = False
        if self._response is not None:
            self._response.close()
        self._engines.abort(self.worker, self.rid)

    def _connection_error(self, error: Exception) -> WorkerLost:
        fields = {"worker": self.worker.name, "rid": self.rid, "reason": str(error) or type(error).__name__}
        log.info("engine call failed", extra={"fields": fields})
        return WorkerLost(
            f"the connection to worker {self.worker.name} broke",
            worker=self.worker.name,
            was_reached=not isinstance(error, aiohttp.ConnectionTimeoutError),
        )


def _socket(address: tuple) -> socket.socket:
    """A TCP socket with keep-alive probes, so that a dead peer is noticed within 15 s."""
    family, kind, protocol, *_ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock
