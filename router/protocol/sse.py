"""Relays the engine's events to the client: whole events, unchanged except for two fields that are set, and two nulls
and `text_offset` that are left out.

Events are not parsed. The code searches for bytes with unescaped quotes, which cannot occur inside a JSON string, so it
matches only JSON structure, never generated text.
"""

from __future__ import annotations

import re

import msgspec

DONE = b"data: [DONE]\n\n"

# Objects of numbers: `usage.prompt_tokens_details`, and `sglext.cached_tokens_details` where a client asks for it.
_CACHED_DETAILS = re.compile(rb'"(prompt_tokens_details|cached_tokens_details)":\{[^{}]*\}')

# What later pieces of a function call do not repeat: OpenAI leaves it out, and its client for Node takes a null for
# another name.
_UNNAMED = b'"function":{"name":null,'
_NO_ID = b'{"id":null,"index":'

# Engines put -1 for each token. Real offsets need all tokens before, and events are not parsed.
_TEXT_OFFSET = re.compile(rb'"text_offset":\[[-0-9,]*\],|,"text_offset":\[[-0-9,]*\](?=\})')

_EVENT_HEAD = b'data: {"id":'
_ANSWER_HEAD = b'{"id":'
_ABORTED = b'"finish_reason":"abort"'
_ERROR_HEADS = (b'data: {"error":', b'data: {"object":"error"')
# The above contain one of these, and no string of JSON can. The cheapest check, because it is made for every event.
FAILURE_WORDS = b'"error"', b'"abort"'


class EventSplitter:
    """Splits a stream of bytes into whole server-sent events."""

    def __init__(self) -> None:
        self.tail = b""  # the beginning of an incomplete event

    def feed(self, data: bytes) -> bytes:
        """The events that `data` completes; may be empty."""
        if self.tail:
            data = self.tail + data
        if data.endswith(b"\n\n"):
            self.tail = b""
            return data
        complete, boundary, self.tail = data.rpartition(b"\n\n")
        return complete + boundary


class Signature:
    """Inserts `system_fingerprint`, and `model` as the client named it, into answers.

    Leaves out the nulls of later pieces of a function call.
    """

    may_drop_events = False

    def __init__(
        self, fingerprint: str, *, engine_model: str, requested_model: str, hides_cached_tokens: bool = False
    ) -> None:
        """`hides_cached_tokens`: in a prefix cache shared between tenants, the counts would reveal others' prompts."""
        inserted = b'"system_fingerprint":' + msgspec.json.encode(fingerprint) + b","
        self._event_head = b"data: {" + inserted + b'"id":'
        self._answer_head = b"{" + inserted + b'"id":'
        self._engine_model = b'"model":' + msgspec.json.encode(engine_model)
        self._requested_model = b'"model":' + msgspec.json.encode(requested_model)
        self._renames = engine_model != requested_model
        self._hides_cached_tokens = hides_cached_tokens

    def on_events(self, events: bytes) -> bytes:
        """Sign whole events."""
        events = events.replace(_EVENT_HEAD, self._event_head)
        if _UNNAMED in events:
            events = events.replace(_UNNAMED, b'"function":{').replace(_NO_ID, b'{"index":')
        if self._renames:
            events = events.replace(self._engine_model, self._requested_model)
        if events.find(b'"text_offset":[') >= 0:
            events = _TEXT_OFFSET.sub(b"", events)
        return without_cached_tokens(events) if self._hides_cached_tokens else events

    def on_answer(self, answer: bytes) -> bytes:
        """Sign a whole answer."""
        if answer.startswith(_ANSWER_HEAD):
            answer = self._answer_head + answer[len(_ANSWER_HEAD) :]
        if self._renames:
            answer = answer.replace(self._engine_model, self._requested_model, 1)
        return without_cached_tokens(answer) if self._hides_cached_tokens else answer


def without_cached_tokens(data: bytes) -> bytes:
    """Whole events or a whole answer, without the counts of cached prompt tokens."""
    if data.find(b'"cached_tokens') < 0:
        return data
    return _CACHED_DETAILS.sub(rb'"\1":null', data)


def is_aborted(data: bytes) -> bool:
    """True if the engine aborted the sequence. `data` is whole events or a whole answer."""
    return _ABORTED in data


def error_in(events: bytes) -> bytes | None:
    """The data of an error event, None if there is none."""
    for head in _ERROR_HEADS:
        start = events.find(head)
        if start >= 0:
            return events[start + len(b"data: ") : events.find(b"\n", start)]
    return None
