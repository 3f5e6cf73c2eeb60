"""Validates a request against the admission contract. Values stay the client's bytes."""

import re
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any, Self

import msgspec

from router.errors import InvalidField
from router.protocol.embeddings import Vectors
from router.protocol.enforced_calls import enforce_calls
from router.protocol.field_values import (
    Limits,
    adapter_scale,
    answer_limit,
    boolean,
    decode_token_ids,
    decoded,
    integer,
    items_of,
    reference,
    shown,
)
from router.protocol.fields import (
    ADAPTER,
    ADAPTER_SCALE,
    BOOKKEEPING,
    CHAT_ONLY,
    COMPLETIONS_ONLY,
    EMBEDDINGS,
    NOT_OFFERED,
    STICKY,
)
from router.protocol.request_body import Fields, split
from router.protocol.responses import fields as responses
from router.protocol.responses.request import as_chat, named_as_here
from router.protocol.rules import INT32_MAX, INTEGERS, MAX_TOP_LOGPROBS, RULES, check_token_ids, includes_usage

_NULL = msgspec.Raw(b"null")
_NOT_OF_A_SEQUENCE = frozenset({"n", "best_of", "prompt"})
_FEW = 12  # fields, which an error can name
_NOT_ZERO = re.compile(rb"[1-9]")
_GENERATION = frozenset(RULES)


class Endpoint(Enum):
    """The inference endpoints. `value` is the path at the router."""

    CHAT = "/v1/chat/completions", "chat", "chatcmpl-"
    COMPLETIONS = "/v1/completions", "completions", "cmpl-"
    RESPONSES = "/v1/responses", "responses", "resp_", "/v1/chat/completions"
    EMBEDDINGS = "/v1/embeddings", "embeddings", "embd-", "/generate"

    def __new__(cls, path: str, label: str, id_prefix: str, engine_path: str | None = None) -> Self:
        endpoint = object.__new__(cls)
        endpoint._value_ = path
        endpoint.label = label
        endpoint.id_prefix = id_prefix
        endpoint.engine_path = engine_path or path
        return endpoint

    label: str  # in metrics and logs
    id_prefix: str  # of answers' ids
    engine_path: str


class Sequence(msgspec.Struct, frozen=True):
    """One prompt with one continuation: the unit of placement."""

    index: int  # of its choice in the answer: prompt index x n + j
    fields: Fields  # without `model`, `adapter` and `n`; `prompt` (`text` or `input_ids` at /generate) is its own
    most_tokens: int | None = None  # to be generated, where `fields` do not say


class ValidatedRequest(msgspec.Struct, frozen=True):
    """A request with valid routing fields."""

    endpoint: Endpoint
    fields: Fields  # without `model`, `adapter` and nulls
    model: str  # as the client wrote it
    adapter: str | None
    prompts: tuple[msgspec.Raw, ...]  # none for a chat
    adapter_scale: float | None = None  # as the client wrote it
    is_streaming: bool = False
    includes_usage: bool = False  # the client wants a usage event at the stream's end
    num_per_prompt: int = 1  # `n`
    seed: int | None = None
    echoes: bool = False
    wants_prompt_logprobs: bool = False  # `echo` with `logprobs`
    generates: bool = False  # as is the case for `max_tokens` = 0 and embeddings: the prompt is only read
    prefill_output: Vectors | None = None  # of embeddings
    most_tokens: int | None = None  # that a choice may have, where the client sets no limit and the router has to
    repeated: dict[str, Any] | None = None  # by a response; of a request of /v1/responses, whose fields are a chat's
    sticky_key: str | None = None  # requests with the same one get the same revision of a split alias

    @property
    def num_choices(self) -> int:
        return max(1, len(self.prompts)) * self.num_per_prompt

    @property
    def most_output_tokens(self) -> int | None:
        """The most tokens that the answer can have; None: as many as the context has room for."""
        limit = answer_limit(self.fields)
        each = self.most_tokens if limit is None else limit
        return None if each is None else self.num_choices * each

    def sequences(self) -> Iterator[Sequence]:
        """One per choice. Choice j of a prompt samples with seed + j; otherwise all n would be equal."""
        shared = {name: value for name, value in self.fields.items() if name not in _NOT_OF_A_SEQUENCE}
        for p, prompt in enumerate(self.prompts or (None,)):
            for j in range(self.num_per_prompt):
                fields = dict(shared)
                if prompt is not None:
                    fields[self._prompt_field(prompt)] = prompt
                if self.seed is not None and j:
                    fields["seed"] = msgspec.Raw(str(self.seed + j).encode())
                yield Sequence(p * self.num_per_prompt + j, fields, self.most_tokens)

    def _prompt_field(self, prompt: msgspec.Raw) -> str:
        if self.prefill_output is not None:
            return "text" if bytes(prompt)[:1] == b'"' else "input_ids"
        return "prompt"


FIELDS = {  # of each endpoint, all others are refused
    Endpoint.CHAT: _GENERATION - COMPLETIONS_ONLY,
    Endpoint.COMPLETIONS: _GENERATION - CHAT_ONLY,
    Endpoint.RESPONSES: responses.FIELDS,
    Endpoint.EMBEDDINGS: EMBEDDINGS | {"model", ADAPTER, ADAPTER_SCALE},
}
_NOT_OFFERED = dict.fromkeys(Endpoint, NOT_OFFERED) | {Endpoint.RESPONSES: responses.NOT_OFFERED}


def validate(endpoint: Endpoint, body: bytes, limits: Limits) -> ValidatedRequest:
    """Validate a request. Raises RequestError, which names the field and the expected value."""
    given = split(body, limits.request.nesting)
    fields = known_fields(endpoint.value, given, FIELDS[endpoint], _NOT_OFFERED[endpoint])
    model = reference(fields, "model")
    if model is None:
        raise InvalidField(
            "model is required: the base model's name, an adapter's name, or base:adapter", param="model"
        )
    adapter = reference(fields, ADAPTER)
    if endpoint is Endpoint.EMBEDDINGS:
        validated = _embeddings(fields, model, adapter, limits)
    elif endpoint is Endpoint.RESPONSES:
        validated = _response(fields, model, adapter, limits)
    else:
        validated = _generation(endpoint, fields, model, adapter, limits, len(body))
    if ADAPTER_SCALE in fields:
        validated = msgspec.structs.replace(validated, adapter_scale=adapter_scale(fields))
    for name in STICKY:
        if name in fields and (key := decoded(fields, name, str, "a string")):  # clients send empty ones for none
            return msgspec.structs.replace(validated, sticky_key=key)
    return validated


def _embeddings(fields: Fields, model: str, adapter: str | None, limits: Limits) -> ValidatedRequest:
    if "user" in fields:
        RULES["user"](fields, "user", limits)
    vectors = Vectors.of(fields)
    prompts = _prompts(fields, "input", limits)
    _check_choice_bytes({}, prompts, 1, limits, "input")
    return ValidatedRequest(Endpoint.EMBEDDINGS, vectors.engine_fields, model, adapter, prompts, prefill_output=vectors)


def _generation(
    endpoint: Endpoint, fields: Fields, model: str, adapter: str | None, limits: Limits, num_bytes: int
) -> ValidatedRequest:
    """A request of one of the endpoints that generate. Raises InvalidField."""
    for name in fields:
        RULES[name](fields, name, limits)
    is_streaming = boolean(fields, "stream")
    max_top_logprobs = min(MAX_TOP_LOGPROBS, limits.vocabulary)
    n = integer(fields, "n", 1, INT32_MAX) or 1
    max_tokens = integer(fields, "max_tokens", 1 if endpoint is Endpoint.CHAT else 0, INT32_MAX)
    integer(fields, "top_logprobs", 0, max_top_logprobs)
    if endpoint is Endpoint.CHAT:
        if "messages" not in fields:
            raise InvalidField("messages is required: a list of at least one message", param="messages")
        boolean(fields, "logprobs")
        if "tools" in fields or "tool_choice" in fields:
            fields = enforce_calls(fields)
        prompts: tuple[msgspec.Raw, ...] = ()
        num_logprobs = None
        echoes = wants_prompt_logprobs = False
    else:
        prompts = tuple(map(_for_completions, _prompts(fields, "prompt", limits)))
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
        if "suffix" in fields:
            decoded(fields, "suffix", str, "a string")
            limits.check_prompt_size("suffix", len(memoryview(fields["suffix"])))
    num_choices = max(1, len(prompts)) * n
    if num_choices > limits.max_choices:
        raise InvalidField(
            f"n x prompts is {num_choices}; at most {limits.max_choices} choices are served per request",
            param="n" if n > 1 else "prompt",
        )
    if num_choices * num_bytes > limits.request.choice_bytes:  # else it is less, too
        _check_choice_bytes(fields, prompts, n, limits)
    if num_choices > 1 and "logit_bias" in fields:
        _check_choice_biases(fields, num_choices, limits)
    if wants_prompt_logprobs:
        _check_prompt_logprobs(prompts, num_logprobs or 0, limits)
    most_tokens = None if is_streaming else _most_tokens(endpoint, fields, num_choices, limits)
    return ValidatedRequest(
        endpoint=endpoint,
        fields={name: value for name, value in fields.items() if name not in _OURS},
        model=model,
        adapter=adapter,
        is_streaming=is_streaming,
        includes_usage=includes_usage(fields, is_streaming),
        prompts=prompts,
        num_per_prompt=n,
        seed=integer(fields, "seed", *INTEGERS["seed"]),
        echoes=echoes,
        wants_prompt_logprobs=wants_prompt_logprobs,
        generates=max_tokens != 0,
        most_tokens=most_tokens,
    )


def _check_choice_biases(fields: Fields, num_choices: int, limits: Limits) -> None:
    """Bound n x prompts x biases, because engines write them one by one into a tensor of the batch."""
    num_biases = len(msgspec.json.decode(fields["logit_bias"], type=dict[str, float]))
    if (total := num_choices * num_biases) > limits.request.choice_biases:
        raise InvalidField(
            f"n x prompts x logit_bias is {total}; at most {limits.request.choice_biases} are served per request",
            param="logit_bias",
        )


def _check_prompt_logprobs(prompts: tuple[msgspec.Raw, ...], num_logprobs: int, limits: Limits) -> None:
    """Bound a prompt's log-probabilities by its bytes, since engines convert each one to text on the event loop."""
    longest = max(len(memoryview(prompt)) for prompt in prompts)
    if (total := longest * (1 + num_logprobs)) > limits.request.prompt_logprobs:
        raise InvalidField(
            f"echo with logprobs: the bytes of a prompt x (1 + logprobs) is {total}; at most "
            f"{limits.request.prompt_logprobs} are served",
            param="logprobs",
        )


def _most_tokens(endpoint: Endpoint, fields: Fields, num_choices: int, limits: Limits) -> int | None:
    """The limit of a choice's tokens that bounds its log-probabilities; None if the client's limit suffices.

    Streams need none, but an answer that is not streamed is built, merged and sent as a whole. Raises InvalidField.
    """
    if endpoint is Endpoint.CHAT:
        alternatives = (integer(fields, "top_logprobs", 0, INT32_MAX) or 0) if boolean(fields, "logprobs") else None
    else:
        alternatives = integer(fields, "logprobs", 0, INT32_MAX)
    if alternatives is None:
        return None
    most = limits.request.answer_logprobs // (num_choices * (1 + alternatives))
    given = integer(fields, "max_completion_tokens", 1, INT32_MAX) or integer(fields, "max_tokens", 0, INT32_MAX)
    if given is None:  # a completion has 16 tokens then
        return max(1, most) if endpoint is Endpoint.CHAT and most < limits.context_length else None
    if min(given, limits.context_length) > most:
        raise InvalidField(
            f"n x prompts x max_tokens x (1 + alternatives) is {num_choices * given * (1 + alternatives)} "
            f"log-probabilities; at most {limits.request.answer_logprobs} are served in an answer that is not "
            f"streamed: set stream to true, or max_tokens to at most {most}",
            param="max_tokens",
        )
    return None


_OURS = BOOKKEEPING | {"model", ADAPTER, ADAPTER_SCALE}


def known_fields(path: str, given: Fields, known: Collection[str], not_offered: Mapping[str, str]) -> Fields:
    """The fields without nulls, which OpenAI's clients send for absent ones. Raises RequestError for unknown ones."""
    fields = {}
    for name, value in given.items():
        if value != _NULL:
            if name not in known:
                raise _unknown(path, name, known, not_offered)
            fields[name] = value
    return fields


def _unknown(path: str, name: str, known: Collection[str], not_offered: Mapping[str, str]) -> InvalidField:
    if name in not_offered:
        return InvalidField(f"{name} is not offered: {not_offered[name]}", param=name)
    shortened = name if len(name) <= 60 else f"{name[:57]}..."
    remedy = f"it takes {', '.join(sorted(known))}" if len(known) <= _FEW else "docs/api.md has those that are"
    if path == Endpoint.RESPONSES.value and name in FIELDS[Endpoint.CHAT]:
        remedy = f"{Endpoint.CHAT.value} takes it"
    return InvalidField(f"{shortened} is not a field of {path}; {remedy}", param=shortened)


def _check_choice_bytes(
    fields: Fields, prompts: tuple[msgspec.Raw, ...], n: int, limits: Limits, name: str = "prompt"
) -> None:
    """Bound n x prompts x bytes, because each sequence's text is sent to one or two engines."""
    shared = sum(len(memoryview(value)) for name, value in fields.items() if name != "prompt")
    total = n * (sum(len(memoryview(prompt)) for prompt in prompts) + max(1, len(prompts)) * shared)
    if total > limits.request.choice_bytes:
        raise InvalidField(
            f"n x prompts x bytes is {total}; at most {limits.request.choice_bytes} are served per request",
            param="n" if n > 1 else name if prompts else "messages",
        )


def _response(fields: Fields, model: str, adapter: str | None, limits: Limits) -> ValidatedRequest:
    """Validate a Responses request as the chat that it is translated to."""
    chat, repeated = as_chat(fields, limits)
    num_bytes = sum(len(memoryview(value)) for value in chat.values())
    try:
        validated = _generation(Endpoint.CHAT, chat, model, adapter, limits, num_bytes)
    except InvalidField as error:
        raise named_as_here(error) from None
    wants_usage = validated.is_streaming
    return msgspec.structs.replace(
        validated, endpoint=Endpoint.RESPONSES, includes_usage=wants_usage, repeated=repeated
    )


def _prompts(fields: Fields, name: str, limits: Limits) -> tuple[msgspec.Raw, ...]:
    """The prompts of a field as the client's bytes: one string or list of ids, or several of either."""
    expected = "a string, a list of token ids, or a list of either"
    raw = fields.get(name)
    if raw is None:
        raise InvalidField(f"{name} is required: {expected}", param=name)
    start = bytes(memoryview(raw)[:64])
    if start[:1] != b"[":
        return (_checked_prompt(raw, name, limits),)
    first = start[1:].lstrip()[:1]
    if first == b"]":
        raise InvalidField(f"{name} must not be empty", param=name)
    if first not in (b'"', b"["):
        return (_checked_prompt(raw, name, limits),)
    items = items_of(raw, name, limits.max_choices, "prompts", expected)
    if any(memoryview(item)[:1] != first for item in items):
        raise InvalidField(f"{name} must not mix strings and lists of token ids", param=name)
    return tuple(_checked_prompt(item, f"{name}[{i}]", limits) for i, item in enumerate(items))


def _checked_prompt(raw: msgspec.Raw, name: str, limits: Limits) -> msgspec.Raw:
    size, param = len(memoryview(raw)), name.partition("[")[0]
    limits.check_prompt_size(name, size)
    if memoryview(raw)[:1] == b'"':
        if size == 2:
            raise InvalidField(f"{name} must not be empty", param=param)
        return raw
    if memoryview(raw)[:1] != b"[":
        raise InvalidField(f"{name} must be a string or a list of token ids (found {shown(raw)})", param=param)
    ids = decode_token_ids(raw, name, limits)
    if not ids:
        raise InvalidField(f"{name} must not be empty", param=param)
    check_token_ids(name, ids, limits)
    return raw


def _for_completions(prompt: msgspec.Raw) -> msgspec.Raw:
    """A prompt as engines' completions endpoint takes it.

    Engines treat a list of only zeros as an empty prompt, but not when it is one of several prompts.
    """
    is_zeros = memoryview(prompt)[:1] == b"[" and not _NOT_ZERO.search(prompt)
    return msgspec.Raw(b"[" + bytes(prompt) + b"]") if is_zeros else prompt
