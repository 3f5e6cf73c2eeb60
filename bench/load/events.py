"""Reads a stream of server-sent events of an OpenAI-compatible API. Bounded, whatever the server sends."""

from typing import Any

import msgspec

_MAX_LINE = 4 * 1024**2  # bytes
_MAX_EVENTS = 2_000_000  # with tokens
_MAX_SHOWN = 200


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning_content or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        """Tokens may have no text, so an empty one counts unless it opens or ends the answer."""
        if self.delta is not None:
            return not self.delta.is_empty or not (self.delta.role or self.finish_reason)
        return bool(self.text) or not self.finish_reason


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class MalformedStream(Exception):
    """Not a stream of events as OpenAI's API has it."""


class EventStream:
    """One answer as far as it has come."""

    def __init__(self) -> None:
        self.token_s: list[float] = []
        self.is_done = False
        self.error: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self._completion_tokens: int | None = None
        self._ended_s: float | None = None  # by an event that may have had the last token, without text
        self._is_chat = False
        self._rest = b""

    @property
    def output_tokens(self) -> int:
        """As the server counted them; without usage, the number of events."""
        return len(self.token_s) if self._completion_tokens is None else self._completion_tokens

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes that came now. Raises MalformedStream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            raise MalformedStream(f"a line of more than {_MAX_LINE} bytes")
        for line in lines:
            if line.startswith(b"data:"):  # what else there is: comments, names of events, empty lines
                self._take(line[5:].strip(), now_s)

    def _take(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self.is_done = True
            self._count_last_token()
            return
        try:
            event = _decode(payload)
        except msgspec.DecodeError as error:
            raise MalformedStream(f"{error}: {payload[:_MAX_SHOWN].decode(errors='replace')}") from error
        if event.error is not None or event.object == "error":
            self.error = error_text(event.error if event.error is not None else event.message)
            return
        if event.usage is not None:
            self._count(event.usage)
        if any(choice.has_tokens for choice in event.choices):
            if len(self.token_s) >= _MAX_EVENTS:
                raise MalformedStream(f"more than {_MAX_EVENTS} events")
            self.token_s.append(now_s)
        elif any(choice.finish_reason for choice in event.choices):
            self._ended_s, self._is_chat = now_s, event.choices[0].delta is not None

    def _count_last_token(self) -> None:
        """Special tokens have no text. If the last one is such, nothing but the server's count tells that it came.

        A chat's last event comes after its last token, so there it stands for a token only where nothing else does.
        """
        if self._ended_s is None or (self._completion_tokens or 0) <= len(self.token_s):
            return
        if not (self._is_chat and self.token_s):
            self.token_s.append(max([self._ended_s, *self.token_s[-1:]]))

    def _count(self, usage: _Usage) -> None:
        self.prompt_tokens, self._completion_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens


def error_text(error: Any) -> str:
    """An error's code, or else its message, of whatever shape it is; shortened.

    SGLang and vLLM have the status for a code, which says nothing more.
    """
    if isinstance(error, dict):
        code = error.get("code")
        is_word = isinstance(code, str) and not code.isdecimal()
        error = (code if is_word else None) or error.get("message") or error.get("type") or code or error
    return str(error)[:_MAX_SHOWN]
