"""Relays the engine's answers to the client: unchanged except for two fields that are set, and two nulls and
`text_offset` that are left out. Of a stream, whole events.

Events are not parsed. The code searches for bytes with unescaped quotes, which cannot occur inside a JSON string, so it
matches only JSON structure, never generated text. Only the usage event is parsed: the last one before [DONE], with the
engine's token counts.
"""

import re

import msgspec

DONE = b"data: [DONE]\n\n"

# Objects of numbers: `usage.prompt_tokens_details`, and `sglext.cached_tokens_details` where a client asks for it.
_CACHED_DETAILS = re.compile(rb'"(prompt_tokens_details|cached_tokens_details)":\{[^{}]*\}')

# What later pieces of a function call do not repeat: OpenAI leaves it out, and its client for Node takes a null for
# another name.
_UNNAMED = b'"function":{"name":null,'
_NO_ID = b'{"id":null,"index":'

_TEXT_OFFSET = b'"text_offset":['  # engines put -1 for each token

_EVENT_HEAD = b'data: {"id":'
_ANSWER_HEAD = b'{"id":'
_ABORTED = b'"finish_reason":"abort"'
_ERROR_HEADS = (b'data: {"error":', b'data: {"object":"error"')
# The above contain one of these, and no string of JSON can. The cheapest check, because it is made for every event.
FAILURE_WORDS = b'"error"', b'"abort"'
# How events end whose last one is the usage event, and few others: most have no counts. A cheap check for every event.
USAGE_END = b"}}\n\n"

# Unescaped quotes, so no generated text can contain it. Every event of a choice has one in its list.
_NO_CHOICES = b'"choices":[]'
_PROMPT_HEAD, _CACHED_HEAD = b'"prompt_tokens":', b'"cached_tokens":'
_PROMPT_TOKENS, _CACHED_TOKENS = (re.compile(head + rb"(\d{1,9})") for head in (_PROMPT_HEAD, _CACHED_HEAD))
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d{1,9})')


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


class AnswerRewriter:
    """Inserts `system_fingerprint`, and `model` as the client named it, into answers.

    Leaves out the nulls of later pieces of a function call.
    """

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
        if events.find(_TEXT_OFFSET) >= 0:
            events = _without_text_offsets(events)
        return without_cached_tokens(events) if self._hides_cached_tokens else events

    def on_answer(self, answer: bytes) -> bytes:
        """Sign a whole answer."""
        if answer.startswith(_ANSWER_HEAD):
            answer = self._answer_head + answer[len(_ANSWER_HEAD) :]
        if self._renames:
            answer = answer.replace(self._engine_model, self._requested_model, 1)
        if answer.find(_TEXT_OFFSET) >= 0:
            answer = _without_text_offsets(answer)
        return without_cached_tokens(answer) if self._hides_cached_tokens else answer


def _without_text_offsets(data: bytes) -> bytes:
    parts, end = [], 0
    while (start := data.find(_TEXT_OFFSET, end)) >= 0:
        after = data.index(b"]", start) + 1
        is_last = data[after : after + 1] != b","
        parts.append(data[end : start - is_last])  # the comma before goes, or the one behind
        end = after + (not is_last)
    return b"".join([*parts, data[end:]])


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


class Usage(msgspec.Struct):
    """Token counts of one sequence or of all."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: dict[str, int | None] | None = None
    reasoning_tokens: int | None = 0
    completion_tokens_details: dict[str, int | None] | None = None  # OpenAI's place of these, if there are any


class _Event(msgspec.Struct):
    usage: Usage | None = None


_event = msgspec.json.Decoder(_Event)


def take_usage(events: bytes, *, keeps: bool) -> tuple[bytes, Usage | None]:
    """The events, without the usage event unless `keeps`, and the usage event's counts; None if there is none."""
    found = events.rfind(_NO_CHOICES)
    if found < 0:
        return events, None
    before = events.rfind(b"\n\n", 0, found)
    start, end = 0 if before < 0 else before + 2, events.find(b"\n\n", found) + 2
    try:
        usage = _event.decode(events[start:end].removeprefix(b"data: ")).usage
    except msgspec.DecodeError:  # nothing that an engine sends; the stream need not end for it
        return events, None
    if usage is None or keeps:
        return events, usage
    return events[:start] + events[end:], usage


def prompt_counts(answer: bytes) -> tuple[int, int] | None:
    """Tokens of the prompt and how many of them were cached, as a whole answer has them; None if it has not.

    `find` is faster than a search: the answer may be long. Engines leave the number of cached tokens out if there are
    none.
    """
    start = answer.find(_PROMPT_HEAD)
    if start < 0 or (counted := _PROMPT_TOKENS.match(answer, start)) is None:
        return None
    start = answer.find(_CACHED_HEAD)
    cached = _CACHED_TOKENS.match(answer, start) if start >= 0 else None
    return int(counted[1]), int(cached[1]) if cached else 0


def answer_counts(answer: bytes) -> tuple[int | None, int | None]:
    """The tokens of the prompts and of the output, as a whole answer has them."""
    prompt, completion = _PROMPT_TOKENS.search(answer), _COMPLETION_TOKENS.search(answer)
    return None if prompt is None else int(prompt[1]), None if completion is None else int(completion[1])
