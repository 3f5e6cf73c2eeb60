"""Translates an engine's chat completion to a response: a whole one, or the documented events of a stream.

One object per request. Unlike a chat's, each event of a stream is parsed, since almost all of it changes.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from router.errors import BrokenAnswer, ErrorAnswer
from router.protocol.responses.response import CallItem, Item, MessageItem, ReasoningItem, Response, Status
from router.protocol.sse import Usage, without_cached_tokens

_ENGINE = "an engine"  # blamed for an invalid answer; the attempt knows which one


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None
    index: int | None = None


class _Output(msgspec.Struct):
    """A message, or what a chunk adds to one."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Output | None = None
    delta: _Output | None = None
    finish_reason: str | None = None


class _Chat(msgspec.Struct):
    """A whole answer or a chunk of one."""

    choices: list[_Choice] = []
    usage: Usage | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error


_chat = msgspec.json.Decoder(_Chat)
_error = msgspec.json.Decoder(_ErrorBody)


class ResponseTranslator:
    """The translation of one response. `on_events` may return nothing for some events."""

    def __init__(self, response: Response, *, hides_cached_tokens: bool) -> None:
        self._response = response
        self._hides_cached_tokens = hides_cached_tokens
        self._num_events = 0
        self._open: Item | None = None  # the last item, while events may add to it
        self._open_call = -1  # its index among the calls, if it is a call
        self._finish_reason: str | None = None
        self._usage: Usage | None = None

    def on_answer(self, answer: bytes) -> bytes:
        """Translate a whole answer. Raises BrokenAnswer."""
        chat = self._decoded(answer)
        message = chat.choices[0].message if chat.choices else None
        if message is None:
            raise BrokenAnswer("the engine's answer has no message", worker=_ENGINE)
        response = self._response
        if message.reasoning_content:
            response.add_reasoning().text.append(message.reasoning_content)
        if message.content or not (message.tool_calls or message.reasoning_content):
            response.add_message().text.append(message.content or "")
        for call in message.tool_calls or ():
            response.add_call(call.id, call.function.name).text.append(call.function.arguments or "")
        return msgspec.json.encode(response.ended(chat.choices[0].finish_reason or "stop", chat.usage))

    def on_events(self, events: bytes) -> bytes:
        """Translate whole events of the chat's stream; may return nothing. Raises BrokenAnswer."""
        return b"".join(
            part
            for event in events.split(b"\n\n")
            if (data := event.removeprefix(b"data:").strip())
            for part in (self._end() if data == b"[DONE]" else self._chunk(self._decoded(data)))
        )

    def failed(self, error: ErrorAnswer) -> bytes:
        """The last event of a failed stream. Its code is OpenAI's; `reason` is ours."""
        message = _error.decode(error.body).error.message
        shown = {"code": "server_error", "message": message, "reason": error.code}
        return self._event("response.failed", response=self._response.failed(shown))

    def _decoded(self, data: bytes) -> _Chat:
        try:
            return _chat.decode(without_cached_tokens(data) if self._hides_cached_tokens else data)
        except msgspec.MsgspecError:
            raise BrokenAnswer("the engine's answer is not a chat completion", worker=_ENGINE) from None

    # ---- events -------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        data = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _chunk(self, chunk: _Chat) -> Iterator[bytes]:
        if not self._num_events:
            begun = self._response.begun()
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            delta = choice.delta
            if delta is None:
                continue
            if delta.reasoning_content:
                yield from self._add(ReasoningItem, delta.reasoning_content)
            if delta.content:
                yield from self._add(MessageItem, delta.content)
            for call in delta.tool_calls or ():
                yield from self._add_call(call)

    def _end(self) -> Iterator[bytes]:
        reason = self._finish_reason
        if reason is None:
            raise BrokenAnswer("the engine's stream ended without a reason", worker=_ENGINE)
        if not self._response.items:  # the stream had no output
            yield from self._begin(self._response.add_message())
        yield from self._close(self._response.last_status(reason))
        ended = self._response.ended(reason, self._usage)
        yield self._event(f"response.{ended['status']}", response=ended)

    def _add(self, kind: type[MessageItem | ReasoningItem], text: str) -> Iterator[bytes]:
        if not isinstance(self._open, kind):
            yield from self._close("completed")
            response = self._response
            yield from self._begin(response.add_message() if kind is MessageItem else response.add_reasoning())
        yield self._delta(text)

    def _add_call(self, call: _Call) -> Iterator[bytes]:
        index, function = call.index or 0, call.function
        if not isinstance(self._open, CallItem) or index != self._open_call:
            if index <= self._open_call:
                raise BrokenAnswer("the engine's stream went back to an earlier function call", worker=_ENGINE)
            yield from self._close("completed")
            self._open_call = index
            yield from self._begin(self._response.add_call(call.id, function.name))
        if function.arguments:
            yield self._delta(function.arguments)

    def _begin(self, item: Item) -> Iterator[bytes]:
        self._open = item
        shown = item.shown("in_progress")
        if isinstance(item, CallItem):
            yield self._event("response.output_item.added", output_index=self._index, item=shown)
            return
        yield self._event("response.output_item.added", output_index=self._index, item={**shown, "content": []})
        yield self._event("response.content_part.added", **self._place, part=item.part())

    def _delta(self, text: str) -> bytes:
        item = self._open
        assert item is not None
        item.text.append(text)
        if isinstance(item, MessageItem):
            return self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])
        if isinstance(item, ReasoningItem):
            return self._event("response.reasoning_text.delta", **self._place, delta=text)
        return self._event(
            "response.function_call_arguments.delta", item_id=item.id, output_index=self._index, delta=text
        )

    def _close(self, status: Status) -> Iterator[bytes]:
        item, self._open = self._open, None
        if item is None:
            return
        place = {"item_id": item.id, "output_index": self._index}
        text = "".join(item.text)
        if isinstance(item, CallItem):
            yield self._event("response.function_call_arguments.done", **place, name=item.name, arguments=text)
        else:
            place |= {"content_index": 0}
            if isinstance(item, MessageItem):
                yield self._event("response.output_text.done", **place, text=text, logprobs=[])
            else:
                yield self._event("response.reasoning_text.done", **place, text=text)
            yield self._event("response.content_part.done", **place, part=item.part())
        yield self._event("response.output_item.done", output_index=self._index, item=item.shown(status))

    @property
    def _index(self) -> int:
        return len(self._response.items) - 1  # items are closed before another begins

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": self._index, "content_index": 0}
