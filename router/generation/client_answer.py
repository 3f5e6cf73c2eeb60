"""The HTTP answer to the client: either one body, or a stream that starts with the first event."""

import asyncio
from collections.abc import Callable, Coroutine
from operator import attrgetter
from typing import Any

from router.errors import ErrorAnswer
from router.generation.request import Request
from router.http.connections import ClientConnection
from router.protocol.request_body import ClientGone

_LAST_EVENT_S = 1.0  # to send an error event; the error may be that the client has stopped reading
_MAX_HEADER = 4096  # characters of a header


class ClientAnswer:
    """Sends one answer. Sends nothing before the first output, so an earlier failure still gets its own HTTP status."""

    def __init__(self, connection: ClientConnection, request: Request, *, timeout_s: float) -> None:
        self.connection = connection
        self.error_event: Callable[[ErrorAnswer], bytes] = attrgetter("event")  # how a stream that has begun says so
        self._request = request
        self._timeout_s = timeout_s
        self._is_streaming = False
        self.is_complete = False  # the last byte was handed to the transport

    def writer(self, translate: Callable[[bytes], bytes]) -> Callable[[bytes], None]:
        """A function that translates and writes events, without inner calls: every event of most streams passes it.

        It writes the stream's head before the first ones, and never waits: `connection.fed_by` pauses sources. A
        translation turns an event into none, one or several.
        """
        request, connection, write = self._request, self.connection, self.connection.transport.write

        def write_translated(events: bytes) -> None:
            request.num_events += events.count(b"data: ")  # the engine's
            events = translate(events)
            if not events:
                return
            if not self._is_streaming:
                self._begin_stream(events)
            elif not connection.is_lost:
                write(b"%x\r\n%b\r\n" % (len(events), events))

        return write_translated

    async def end_stream(self, last: bytes, sign: Callable[[bytes], bytes]) -> None:
        """Send the last events, signed, and end the stream."""
        self._request.num_events += last.count(b"data: ")
        last = sign(last)
        if self._is_streaming:
            self.connection.end(last)
        else:
            self._begin_stream(last)
            self.connection.end()
        await self._finish(self._timeout_s)

    async def whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        """Send an answer in one piece."""
        self.connection.whole(status, body, self._all_headers(status, headers))
        await self._finish(self._timeout_s)

    async def fail(self, error: ErrorAnswer) -> None:
        """Send an error as the answer, or as the last event of a stream that has begun, which then has no [DONE]."""
        if not self._is_streaming:
            await self.whole(error.status, error.body, error.headers)
            return
        self._request.stream_error = error.code
        self.connection.end(self.error_event(error))
        await self._finish(_LAST_EVENT_S)

    def _begin_stream(self, events: bytes) -> None:
        self._request.first_byte_s = self._request.age_s
        self._is_streaming = True
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        self.connection.start(self._all_headers(200, headers), events)

    async def _finish(self, timeout_s: float) -> None:
        """Wait until the client has read the answer. If it does not in time, the rest is dropped."""
        self.is_complete = True
        if not await self.connection.is_drained(timeout_s):
            self._request.stream_error = self._request.stream_error or "client_too_slow"
            self.connection.abort()

    def _all_headers(self, status: int, headers: dict[str, str]) -> dict[str, str]:
        self._request.status = status
        if self._request.placements:
            headers = {**headers, "x-prelude-placement": " | ".join(self._request.placements)[:_MAX_HEADER]}
        if (trace_id := self._request.span.trace_id) is not None:
            headers = {**headers, "x-prelude-trace-id": trace_id}
        return {**headers, **self._request.answer_headers, "x-request-id": self._request.request_id}


async def while_connected(
    connection: ClientConnection, work: Coroutine[Any, Any, None], is_complete: Callable[[], bool] = lambda: False
) -> None:
    """Run `work`. If the client closes its connection, cancel it and raise ClientGone."""
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    def leave() -> None:
        nonlocal has_left
        if not is_complete():  # a disconnect after the last byte ends nothing
            has_left = True
            task.cancel()

    connection.watch(leave)
    try:
        await work
    finally:
        connection.unwatch()
        if has_left:
            task.uncancel()
            raise ClientGone
