"""HTTP calls to the engines, and aborts of unfinished ones."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

import aiohttp
import httptools
import msgspec

from cluster.control.transport import PLAIN, Transport
from process.exhaustion import is_exhaustion
from process.tracing.span import NO_SPAN, Span
from router.errors import BrokenAnswer, RouterError, RouterExhausted, WorkerLost
from router.fleet.fleet_state import WorkerView
from router.fleet.worker_errors import engine_error
from router.fleet.worker_loads import InFlightLoad
from router.generation.engine_bodies import Body
from router.http.engine_connections import EngineConnection, EngineConnections, Tls
from router.metrics import Metrics
from router.protocol.request_body import Room
from router.protocol.sse import EventSplitter

_IDLE_S = 2.0  # engines close idle connections after 5 s; a call on a closing one would fail
_MAX_HELD_BACK = 64 * 1024  # bytes of events that nobody has asked for yet; then the engine waits
_ABORT_TIMEOUT_S = 5.0
_ABORT_PAUSES_S = (0.0, 0.5)  # twice: an engine ignores the abort of a request that it has not read yet
_MAX_ABORTS = 16  # concurrent, of each engine; others queue: one that hangs keeps those of no other waiting
_JSON = {"content-type": "application/json"}

log = logging.getLogger(__name__)


class Engines:
    """The HTTP connections to all engines."""

    def __init__(
        self, metrics: Metrics, *, connect_timeout_s: float, max_connections: int, transport: Transport = PLAIN
    ) -> None:
        self.connections = EngineConnections(connect_timeout_s=connect_timeout_s, idle_s=_IDLE_S, most=max_connections)
        # For all calls of a request at once: those refused one by one would have occupied engines in vain, and broken
        # streams.
        self.room = Room(
            max_connections,
            "connections to engines",
            RouterExhausted,
            "ask for fewer choices or prompts at once, or raise the router's limit of open files",
            lambda: self.exhausted("connections"),
        )
        self._metrics = metrics
        self._transport = transport
        self._session: aiohttp.ClientSession | None = None  # for aborts
        self._aborts: set[asyncio.Task[None]] = set()
        # By URL, as long as there are aborts.
        self._abort_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Engines]:
        """Keep connections open inside the block. At its end, wait for pending aborts, for a bounded time."""
        timeout = aiohttp.ClientTimeout(total=_ABORT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)  # there are slots
        cookies = aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(timeout=timeout, cookie_jar=cookies, connector=connector) as session:
            self._session = session
            try:
                yield self
            finally:
                self.connections.close()
                if self._aborts:
                    await asyncio.wait(self._aborts, timeout=_ABORT_TIMEOUT_S)

    def tls(self, worker: WorkerView) -> Tls | None:
        """The TLS context for a worker's engine, if it serves HTTPS and this router has a certificate."""
        is_https = worker.engine_url.startswith("https:")
        return self._transport.engine_tls(worker.role, worker.name) if is_https else None

    def exhausted(self, reason: str) -> None:
        """Count what this router lacked itself."""
        self._metrics.exhausted.labels(reason).inc()

    def abort(self, worker: WorkerView, rid: str) -> None:
        """Abort a request at an engine, in the background. Never waits, since failure paths call it."""
        self._metrics.aborts.labels(worker.role).inc()
        task = asyncio.create_task(self._abort(worker, rid), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, worker: WorkerView, rid: str) -> None:
        assert self._session is not None
        body = msgspec.json.encode({"rid": rid})
        headers = _JSON | ({"authorization": f"Bearer {worker.engine_key}"} if worker.engine_key else {})
        slots = self._abort_slots.get(worker.engine_url)
        if slots is None:
            slots = self._abort_slots[worker.engine_url] = asyncio.Semaphore(_MAX_ABORTS)
        for pause_s in _ABORT_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                tls = self.tls(worker)
                context, server = (True, None) if tls is None else tls()
                async with (
                    asyncio.timeout(_ABORT_TIMEOUT_S),
                    slots,
                    self._session.post(
                        f"{worker.engine_url}/abort_request",
                        data=body,
                        headers=headers,
                        ssl=context,
                        server_hostname=server,
                    ),
                ):
                    pass
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                fields = {"worker": worker.name, "rid": rid, "reason": str(error) or type(error).__name__}
                log.info("abort not delivered", extra={"fields": fields})
                if not is_exhaustion(error):
                    return


class EngineCall:
    """One request to one engine. `leave` closes the connection and aborts the request if it is not complete.

    At its end it releases `in_flight` and ends `span`. It is the Exchange of its connection: callbacks receive the
    engine's bytes and pass the events on without a task.
    """

    def __init__(
        self,
        engines: Engines,
        worker: WorkerView,
        path: str,
        body: Body,
        rid: str,
        in_flight: InFlightLoad,
        span: Span = NO_SPAN,
    ) -> None:
        self.worker = worker
        self.rid = rid
        self.span = span
        # The first events of a stream, or the whole answer. Fails with RouterError.
        self.output: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._engines = engines
        self._path = path
        self._body = body
        self._in_flight = in_flight
        self._connection: EngineConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._wants_stream = False
        self._is_stream = False  # the answer is a stream: it was wanted, and the status is 200
        self._parts: list[bytes] = []  # of an answer that is not a stream
        self._splitter: EventSplitter | None = None  # of a stream
        self._held_back: list[bytes] = []  # events after the first ones, until `relay`
        self._deliver: Callable[[bytes], None] | None = None
        self.on_chunk: Callable[[bytes], None] | None = None  # `_deliver`, between two chunks that are whole events
        self._ended: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None  # between `output` and `relay`
        self._is_sent = False
        self._is_complete = False
        self._is_left = False

    def start(self, *, wants_stream: bool = False) -> None:
        """Send the request. `output` is its result."""
        self._is_sent, self._wants_stream = True, wants_stream
        self._in_flight.read_begins()
        connection = self._engines.connections.take(self.worker.engine_url, self.worker.engine_key)
        if connection is not None:
            self._send(connection)
        else:
            self._connecting = asyncio.create_task(self._connect(), name=f"connect {self.rid}")

    def relay(self, deliver: Callable[[bytes], None]) -> asyncio.Future[None]:
        """Pass all events after the first ones to `deliver` as they arrive; an error in `deliver` ends the call.

        The future is done at the stream's end. It fails with RouterError, or with what `deliver` raises.
        """
        self._ended = asyncio.get_running_loop().create_future()
        for events in self._held_back:
            deliver(events)
        self._held_back.clear()
        self._deliver = deliver
        if self._failure is not None:
            self._ended.set_exception(self._failure)
        elif self._is_complete:
            self._ended.set_result(None)
        else:
            self.resume_reading()
        return self._ended

    def prompt_was_read(self) -> None:
        """Record that the engine has read the prompt. Idempotent."""
        self._in_flight.read_ended()

    def fail(self, error: BaseException) -> None:
        """Make the reader of this call fail with `error`, if it is still waiting."""
        if isinstance(error, RouterError):
            self.span.fail(error.code)
        waiting = self.output if self._ended is None else self._ended
        if not waiting.done():
            waiting.set_exception(error)
        elif self._ended is None and self._failure is None:
            self._failure = error

    def leave(self) -> None:
        """End the call in any state. Idempotent; never waits."""
        if self._is_left:
            return
        self._is_left = True
        # They know who has this call, and this call: circles would wait for the garbage collector.
        self._deliver = self.on_chunk = None
        connection, self._connection = self._connection, None
        self._in_flight.release()
        if self._connecting is not None:
            self._connecting.cancel()
        for future in (self.output, self._ended):
            if future is not None and not future.cancel() and not future.cancelled():
                future.exception()  # perhaps nobody has asked for it
        if self._is_complete or not self._is_sent:
            self.span.end()
            return
        self.span.set({"prelude.aborted": True})
        self.span.end()
        if connection is not None:
            connection.close()
        self._engines.abort(self.worker, self.rid)

    def pause_reading(self) -> None:
        """Stop reading from the engine."""
        if self._connection is not None and not self._is_complete:
            self._connection.pause_reading()

    def resume_reading(self) -> None:
        if self._connection is not None and not self._is_complete:
            self._connection.resume_reading()

    # ---- the connection's callbacks -----------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        assert self._connection is not None
        self._is_stream = self._wants_stream and self._connection.status == 200
        self._splitter = EventSplitter() if self._is_stream else None

    def on_body(self, data: bytes) -> None:
        deliver, splitter = self._deliver, self._splitter
        if splitter is None:
            self._parts.append(data)
        elif deliver is not None and not splitter.tail and data[-2:] == b"\n\n":
            deliver(data)  # nearly always: an event comes in a piece of its own
        elif events := splitter.feed(data):
            if deliver is not None:
                deliver(events)
            elif not self.output.done():
                self.output.set_result(events)
            else:
                self._hold_back(events)

    def on_chunk_header(self) -> None:
        self.on_chunk = None

    def on_chunk_complete(self) -> None:
        if self._splitter is not None and not self._splitter.tail:
            self.on_chunk = self._deliver

    def on_message_complete(self) -> None:
        connection = self._connection
        assert connection is not None
        self._is_complete = True
        self.on_chunk = None
        connection.finish()
        if connection.status != 200:
            self.fail(engine_error(connection.status, b"".join(self._parts), self.worker.name))
        elif not self._is_stream:
            if not self.output.done():
                self.output.set_result(b"".join(self._parts))
        elif not self.output.done():
            self.fail(BrokenAnswer("the stream ended before its first event", worker=self.worker.name))
        elif self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def on_broken(self, error: BaseException) -> None:
        is_ours = not isinstance(error, (OSError, httptools.HttpParserError))  # raised by `deliver`
        self.fail(error if is_ours else self._connection_error(error))

    async def _connect(self) -> None:
        try:
            worker = self.worker
            connection = await self._engines.connections.connect(
                worker.engine_url, worker.engine_key, self._engines.tls(worker)
            )
        except OSError as error:
            self.fail(self._connection_error(error, was_reached=not isinstance(error, TimeoutError)))
        except Exception as error:  # noqa: BLE001 the request would wait for a call that nobody makes
            self.fail(error)
        else:
            self._send(connection)

    def _send(self, connection: EngineConnection) -> None:
        self._connection = connection
        connection.send(self._path, self._body, self, self.span.headers)

    def _hold_back(self, events: bytes) -> None:
        self._held_back.append(events)
        if sum(map(len, self._held_back)) > _MAX_HELD_BACK:
            self.pause_reading()

    def _connection_error(self, error: BaseException, *, was_reached: bool = True) -> WorkerLost | RouterExhausted:
        fields = {"worker": self.worker.name, "rid": self.rid, "reason": str(error) or type(error).__name__}
        log.info("engine call failed", extra={"fields": fields})
        if isinstance(error, OSError) and is_exhaustion(error):
            reason = errno.errorcode.get(error.errno or 0, "resolver").lower()
            self._engines.exhausted(reason)
            return RouterExhausted(
                f"this router has no means left to reach an engine ({error.strerror}); try again soon"
            )
        return WorkerLost(
            f"the connection to worker {self.worker.name} broke",
            worker=self.worker.name,
            was_reached=was_reached,
            has_broken_connection=True,
        )
