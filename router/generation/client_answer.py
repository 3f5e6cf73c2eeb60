"""The HTTP answer to the client: either whole, or a stream that begins with its first event."""

from __future__ import annotations

import asyncio
from typing import Any

from router.errors import ErrorAnswer
from router.generation.request_state import RequestState

_LAST_EVENT_S = 1.0  # to send an error event; the error may be that the client has stopped reading


class ClientAnswer:
    """Sends one answer. Sends nothing before the first output, so an earlier failure gets its own HTTP status."""

    def __init__(self, send: Any, request: RequestState, *, timeout_s: float) -> None:
        self.headers: dict[str, str] = {}  # name the adapter and its revision; sent with errors too
        self.status: int | None = None  # None until it is sent
        self.stream_error: str | None = None  # code of the error that ended a stream
        self._send = send
        self._request = request
        self._timeout_s = timeout_s
        self._is_streaming = False
        self.is_complete = False  # the last byte was handed to the server

    async def write(self, events: bytes) -> None:
        """Send events, after the stream's head when they are the first."""
        if not self._is_streaming:
            self._request.first_byte_s = self._request.age_s
            self._is_streaming = True
            await self._head(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        self._request.num_events += events.count(b"data: ")
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_stream(self, last: bytes = b"") -> None:
        """Send the last events, if any, and end the stream."""
        await self._finish(last, self._timeout_s)

    async def whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        """Send an answer in one piece."""
        await self._head(status, {**headers, "content-length": str(len(body))})
        await self._finish(body, self._timeout_s)

    async def fail(self, error: ErrorAnswer) -> None:
        """Send an error as the answer, or as the last event of a stream that has begun, which then has no [DONE]."""
        if not self._is_streaming:
            await self.whole(error.status, error.body, error.headers)
            return
        self.stream_error = error.code
        await self._finish(error.event, _LAST_EVENT_S)

    async def _finish(self, body: bytes, timeout_s: float) -> None:
        """Send the last bytes. A client that does not read them in time loses them."""
        self.is_complete = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._send({"type": "http.response.body", "body": body, "more_body": False})
        except TimeoutError:
            self.stream_error = self.stream_error or "client_too_slow"

    async def _head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in (headers | self.headers).items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})
