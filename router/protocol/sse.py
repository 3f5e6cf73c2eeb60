"""Decode's bytes on their way to the client: whole events, untouched but for two insertions.

Nothing is parsed. Both insertions look for bytes that contain unescaped quotes in places where, inside a JSON string,
JSON demands escaped ones; so they can only match JSON's own structure, never what a model wrote.
"""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"

_EVENT_HEAD = b'data: {"id":'
_ANSWER_HEAD = b'{"id":'
_ABORTED = b'"finish_reason":"abort"'
_ERROR_HEADS = (b'data: {"error":', b'data: {"object":"error"')


class EventSplitter:
    """Cuts a stream of bytes into whole server-sent events, however it arrives."""

    def __init__(self) -> None:
        self._tail = b""  # the beginning of an event whose end has not come

    def feed(self, data: bytes) -> bytes:
        """The events that are complete now, b"" when there is none."""
        if self._tail:
            data = self._tail + data
        if data.endswith(b"\n\n"):
            self._tail = b""
            return data
        complete, boundary, self._tail = data.rpartition(b"\n\n")
        return complete + boundary


class Signature:
    """Signs answers with what made them: `system_fingerprint`, and `model` as the client named it."""

    def __init__(self, fingerprint: str, *, engine_model: str, requested_model: str) -> None:
        inserted = b'"system_fingerprint":' + msgspec.json.encode(fingerprint) + b","
        self._event_head = b"data: {" + inserted + b'"id":'
        self._answer_head = b"{" + inserted + b'"id":'
        self._engine_model = b'"model":' + msgspec.json.encode(engine_model)
        self._requested_model = b'"model":' + msgspec.json.encode(requested_model)
        self._renames = engine_model != requested_model

    def on_events(self, events: bytes) -> bytes:
        """Whole events, each signed."""
        events = events.replace(_EVENT_HEAD, self._event_head)
        if self._renames:
            events = events.replace(self._engine_model, self._requested_model)
        return events

    def on_answer(self, answer: bytes) -> bytes:
        """A whole answer, signed."""
        if answer.startswith(_ANSWER_HEAD):
            answer = self._answer_head + answer[len(_ANSWER_HEAD) :]
        if self._renames:
            answer = answer.replace(self._engine_model, self._requested_model, 1)
        return answer


def is_aborted(data: bytes) -> bool:
    """The engine gave a sequence up; `data` is whole events or a whole answer."""
    return _ABORTED in data


def error_in(events: bytes) -> bytes | None:
    """The data of an error event, None when there is none."""
    for head in _ERROR_HEADS:
        start = events.find(head)
        if start >= 0:
            return events[start + len(b"data: ") : events.find(b"\n", start)]
    return None
