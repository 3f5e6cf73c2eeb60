"""Validates the fields that route a request; all other values stay the client's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from router.errors import InvalidField, RefusedField
from router.protocol.field_values import (
    Limits,
    boolean,
    check_token_id_field,
    check_token_ids,
    decoded,
    integer,
    shown,
    string,
)
from router.protocol.fields import ADAPTER, REFUSED, SCORE, USER_FACING
from router.protocol.request_body import Fields, split
from router.protocol.scoring import Labels, score_prompts

_NULL = b"null"
MAX_TOP_LOGPROBS = 100

# Limits of numbers that the engine puts into tensors unchecked; a larger one would crash its scheduler.
INT32_MAX = 2**31 - 1
INTEGERS = {
    "max_completion_tokens": (1, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
    "top_k": (-1, INT32_MAX),
    "seed": (-(2**62), 2**62),
}
MAX_TEMPERATURE = 100.0
MAX_LOGIT_BIAS = 100.0  # as OpenAI's


class Endpoint(Enum):
    """The inference endpoints. `value` is the path at the router."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    SCORE = "/v1/score"

    @property
    def engine_path(self) -> str:
        return "/generate" if self is Endpoint.SCORE else self.value

    @property
    def label(self) -> str:
        return {Endpoint.CHAT: "chat", Endpoint.COMPLETIONS: "completions", Endpoint.SCORE: "score"}[self]

    @property
    def id_prefix(self) -> str:
        return {Endpoint.CHAT: "chatcmpl-", Endpoint.COMPLETIONS: "cmpl-", Endpoint.SCORE: "score-"}[self]


@dataclass(frozen=True, slots=True)
class Sequence:
    """One prompt and one continuation of it: what one placement serves."""

    index: int  # of its choice in the answer: prompt index x n + j
    fields: Fields  # without `model`, `adapter` and `n`; `prompt` (for a score, `text` or `input_ids`) is its own


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A request with valid routing fields."""

    endpoint: Endpoint
    fields: Fields  # without `model`, `adapter` and nulls
    model: str  # as the client wrote it
    adapter: str | None
    is_streaming: bool
    includes_usage: bool  # the client wants a usage event at the stream's end
    prompts: tuple[msgspec.Raw, ...]  # none for a chat
    num_per_prompt: int  # `n`
    seed: int | None
    echoes: bool
    wants_prompt_logprobs: bool  # `echo` with `logprobs`
    generates: bool  # False for `max_tokens` = 0 and for scores: the prompt is read, for log-probabilities
    labels: Labels | None = None  # of a score

    @property
    def num_choices(self) -> int:
        return max(1, len(self.prompts)) * self.num_per_prompt

    def sequences(self) -> Iterator[Sequence]:
        """One per choice. Choice j of a prompt samples with seed + j; otherwise all n would be equal."""
        shared = {name: value for name, value in self.fields.items() if name not in ("n", "best_of", "prompt")}
        for p, prompt in enumerate(self.prompts or (None,)):
            for j in range(self.num_per_prompt):
                fields = dict(shared)
                if prompt is not None:
                    fields[self._prompt_field(prompt)] = prompt
                if self.seed is not None and j:
                    fields["seed"] = msgspec.Raw(str(self.seed + j).encode())
                yield Sequence(p * self.num_per_prompt + j, fields)

    def _prompt_field(self, prompt: msgspec.Raw) -> str:
        if self.endpoint is Endpoint.SCORE:
            return "text" if bytes(prompt)[:1] == b'"' else "input_ids"
        return "prompt"


def validate(endpoint: Endpoint, body: bytes, limits: Limits) -> ValidatedRequest:
    """Validate a request. Raises RequestError, which names the field and the expected value."""
    fields = {name: value for name, value in split(body).items() if bytes(value) != _NULL or name not in _NULLABLE}
    for name in REFUSED.intersection(fields):
        raise RefusedField(f"{name} is not for clients to set; remove it", param=name)
    model = string(fields, "model")
    if model is None:
        raise InvalidField(
            "model is required: the base model's name, an adapter's name, or base:adapter", param="model"
        )
    adapter = string(fields, ADAPTER)
    if endpoint is Endpoint.SCORE:
        return _score(fields, model, adapter, limits)
    is_streaming = boolean(fields, "stream")
    max_top_logprobs = min(MAX_TOP_LOGPROBS, limits.vocabulary)
    n = integer(fields, "n", 1, INT32_MAX) or 1
    for name, (least, most) in INTEGERS.items():
        integer(fields, name, least, most)
    max_tokens = integer(fields, "max_tokens", 1 if endpoint is Endpoint.CHAT else 0, INT32_MAX)
    integer(fields, "top_logprobs", 0, max_top_logprobs)
    _check_floats(fields)
    check_token_id_field(fields, "stop_token_ids", limits)
    decoded(fields, "response_format", dict[str, msgspec.Raw], "an object")
    if endpoint is Endpoint.CHAT:
        check_messages(fields)
        check_token_id_field(fields, "input_ids", limits)
        prompts: tuple[msgspec.Raw, ...] = ()
        echoes = wants_prompt_logprobs = False
    else:
        prompts = _prompts(fields, limits)
        num_logprobs = integer(fields, "logprobs", 0, max_top_logprobs)
        echoes = boolean(fields, "echo")
        wants_prompt_logprobs = echoes and num_logprobs is not None
        if wants_prompt_logprobs and is_streaming:
            raise InvalidField("echo with logprobs is not offered for streams: set stream to false", param="stream")
        if max_tokens == 0 and is_streaming:
            raise InvalidField("max_tokens 0 is not offered for streams: set stream to false", param="stream")
        best_of = integer(fields, "best_of", 1, INT32_MAX)
        if best_of is not None and best_of != n:
            raise InvalidField(f"best_of must equal n ({n}) or be left out (found {best_of})", param="best_of")
    num_choices = max(1, len(prompts)) * n
    if num_choices > limits.max_choices:
        raise InvalidField(
            f"n x prompts is {num_choices}; at most {limits.max_choices} choices are served per request",
            param="n" if n > 1 else "prompt",
        )
    return ValidatedRequest(
        endpoint=endpoint,
        fields={name: value for name, value in fields.items() if name not in ("model", ADAPTER)},
        model=model,
        adapter=adapter,
        is_streaming=is_streaming,
        includes_usage=_includes_usage(fields, is_streaming),
        prompts=prompts,
        num_per_prompt=n,
        seed=integer(fields, "seed", *INTEGERS["seed"]),
        echoes=echoes,
        wants_prompt_logprobs=wants_prompt_logprobs,
        generates=max_tokens != 0,
    )


def _score(fields: Fields, model: str, adapter: str | None, limits: Limits) -> ValidatedRequest:
    labels = Labels.of(fields, limits)
    return ValidatedRequest(
        endpoint=Endpoint.SCORE,
        fields=labels.engine_fields,
        model=model,
        adapter=adapter,
        is_streaming=False,
        includes_usage=False,
        prompts=score_prompts(fields, limits),
        num_per_prompt=1,
        seed=None,
        echoes=False,
        wants_prompt_logprobs=False,
        generates=False,
        labels=labels,
    )


# OpenAI's clients may send null for an absent field. Engines accept that for few fields, so it is dropped.
_NULLABLE = USER_FACING | REFUSED | SCORE | {ADAPTER}


def _check_floats(fields: Fields) -> None:
    temperature = decoded(fields, "temperature", float, "a number")
    if temperature is not None and not 0 <= temperature <= MAX_TEMPERATURE:
        raise InvalidField(f"temperature must be from 0 to {MAX_TEMPERATURE:g}", param="temperature")
    biases = decoded(fields, "logit_bias", dict[str, float], "an object of token ids and numbers") or {}
    if any(abs(bias) > MAX_LOGIT_BIAS for bias in biases.values()):
        raise InvalidField(
            f"logit_bias values must be from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}", param="logit_bias"
        )


def check_messages(fields: Fields) -> None:
    """Raises InvalidField if `messages` is not a list of at least one message with a known role."""
    messages = decoded(fields, "messages", list[msgspec.Raw], "a list of messages")
    if not messages:
        raise InvalidField("messages must be a list of at least one message", param="messages")
    for i, message in enumerate(messages):
        if bytes(message)[:1] != b"{":
            raise InvalidField(f"messages[{i}] must be an object (found {shown(message)})", param="messages")
        role = msgspec.json.decode(message, type=_Message).role
        if not (isinstance(role, str) and role.lower() in ROLES):
            found = "none" if role is None else repr(role)
            raise InvalidField(
                f"messages[{i}].role must be one of {', '.join(ROLES)} (found {found})", param=f"messages[{i}].role"
            )


class _Message(msgspec.Struct):
    role: Any = None


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _prompts(fields: Fields, limits: Limits) -> tuple[msgspec.Raw, ...]:
    """The prompts of a completion as the client's bytes: one string or list of ids, or several of either."""
    expected = "a string, a list of token ids, or a list of either"
    raw = fields.get("prompt")
    if raw is None:
        raise InvalidField(f"prompt is required: {expected}", param="prompt")
    if bytes(raw)[:1] == b'"':
        return (_checked_prompt(raw, "prompt", limits),)
    items = decoded(fields, "prompt", list[msgspec.Raw], expected)
    if not items:
        raise InvalidField("prompt must not be empty", param="prompt")
    first = bytes(items[0])[:1]
    if first not in (b'"', b"["):
        return (_checked_prompt(raw, "prompt", limits),)
    if any(bytes(item)[:1] != first for item in items):
        raise InvalidField("prompt must not mix strings and lists of token ids", param="prompt")
    return tuple(_checked_prompt(item, f"prompt[{i}]", limits) for i, item in enumerate(items))


def _checked_prompt(raw: msgspec.Raw, name: str, limits: Limits) -> msgspec.Raw:
    if bytes(raw)[:1] == b'"':
        if bytes(raw) == b'""':
            raise InvalidField(f"{name} must not be empty", param="prompt")
        return raw
    try:
        ids = msgspec.json.decode(raw, type=list[int])
    except msgspec.MsgspecError:
        raise InvalidField(f"{name} must be a string or a list of token ids", param="prompt") from None
    if not ids:
        raise InvalidField(f"{name} must not be empty", param="prompt")
    check_token_ids(name, ids, limits)
    if not any(ids):  # engines take a list of nothing but 0 for an empty prompt, but not as one prompt of several
        return msgspec.Raw(b"[" + bytes(raw) + b"]")
    return raw


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


def _includes_usage(fields: Fields, is_streaming: bool) -> bool:
    if "stream_options" in fields and not is_streaming:
        raise InvalidField("stream_options needs stream: true; remove it or set stream", param="stream_options")
    options = decoded(fields, "stream_options", _StreamOptions, 'an object such as {"include_usage": true}')
    return bool(options and options.include_usage)
