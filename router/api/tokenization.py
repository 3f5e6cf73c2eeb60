"""POST /v1/tokenize and /v1/detokenize, also without /v1: text to token ids and back, by any engine."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.errors import InvalidField
from router.generation.backends import Backends
from router.generation.tokenizer_calls import DETOKENIZE, TOKENIZE, ask_tokenizer
from router.identity.access import principal_of
from router.protocol.field_values import Limits, boolean, check_token_ids, decoded, reference
from router.protocol.fields import ADAPTER
from router.protocol.request_body import ClientGone, Fields, read_body, split
from router.protocol.rules import RULES
from router.protocol.validation import known_fields
from router.revisions.adapter_service import resolve

_MAX_TEXTS = 1024  # strings, or lists of token ids
# What engines get beside the model's name.
_FIELDS = {
    TOKENIZE: (
        "prompt", "add_special_tokens", "messages", "tools", "tool_choice", "reasoning_effort",
        "continue_final_message", "chat_template_kwargs",
    ),
    DETOKENIZE: ("tokens", "skip_special_tokens"),
}  # fmt: skip


class _Text(msgspec.Struct):
    text: msgspec.Raw  # a string or a list of them, passed on as it is


class TokenizationEndpoint:
    """The two endpoints. Adapters do not change the tokenizer, so `model` only has to exist."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    @property
    def routes(self) -> list[Route]:
        return [
            Route(path, answer, methods=["POST"])
            for name, answer in ((TOKENIZE, self.tokenize), (DETOKENIZE, self.detokenize))
            for path in (name, name.removeprefix("/v1"))
        ]

    async def tokenize(self, request: Request) -> Response:
        """The ids of `prompt`, a string or a list of them, or of `messages` in the chat template."""
        return await self._answer(request, TOKENIZE)

    async def detokenize(self, request: Request) -> Response:
        """The text of `tokens`, as `text` (SGLang's name) and as `prompt` (vLLM's)."""
        return await self._answer(request, DETOKENIZE)

    async def _answer(self, request: Request, path: str) -> Response:
        backends, principal = self._backends, principal_of(request.scope)
        with backends.quotas.admission(principal), backends.bodies.room.growing(principal.confined_to) as take:
            try:
                body = await read_body(
                    dict(request.scope["headers"]),
                    request.receive,
                    max_bytes=backends.config.max_body_bytes,
                    timeout_s=backends.config.body_timeout_s,
                    on_bytes=take,
                )
            except ClientGone:
                return Response()  # for nobody
            fields = await backends.bodies.decode(_decode, path, body, backends.limits, num_bytes=len(body))
            base = backends.model
            model, adapter = reference(fields, "model") or base, reference(fields, ADAPTER)
            await resolve(model, adapter, base, backends.adapters, principal)
            asked = {name: fields[name] for name in _FIELDS[path] if name in fields}
            body = msgspec.json.encode({**asked, "model": base})
            answer = await ask_tokenizer(backends, path, body, f"tok-{request.scope['request_id']}")
        if path == DETOKENIZE:
            answer = await backends.bodies.decode(_under_both_names, answer, num_bytes=len(answer))
        return Response(answer, media_type="application/json")


def _decode(path: str, body: bytes, limits: Limits) -> Fields:
    """The fields without nulls, some in the engines' form. Raises RequestError."""
    fields = known_fields(path, split(body, limits.request.nesting), {*_FIELDS[path], "model", ADAPTER}, {})
    (_check_text if path == TOKENIZE else _check_tokens)(fields, limits)
    return fields


def _check_text(fields: Fields, limits: Limits) -> None:
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidField("prompt or messages is required, and not both", param="prompt")
    for name in fields.keys() & RULES.keys() - {"prompt", "model", ADAPTER}:
        RULES[name](fields, name, limits)
    if "prompt" in fields:
        limits.check_prompt_size("prompt", len(memoryview(fields["prompt"])))
        prompt = decoded(fields, "prompt", str | list[str], "a string or a list of strings")
        if prompt == []:
            raise InvalidField("prompt must not be empty", param="prompt")
        if isinstance(prompt, list):
            _check_count("prompt", len(prompt), "strings", _MAX_TEXTS)
    boolean(fields, "add_special_tokens")


def _check_tokens(fields: Fields, limits: Limits) -> None:
    expected = "a list of token ids, or a list of such lists"
    if "tokens" not in fields:
        raise InvalidField(f"tokens is required: {expected}", param="tokens")
    limits.check_prompt_size("tokens", len(memoryview(fields["tokens"])))
    has_lists = bytes(memoryview(fields["tokens"])[1:64]).lstrip()[:1] == b"["
    ids = decoded(fields, "tokens", list[list[int]] if has_lists else list[int], expected)
    if has_lists:
        _check_count("tokens", len(ids), "lists", _MAX_TEXTS)
    lists = ids if has_lists else [ids]
    _check_count("tokens", sum(map(len, lists)), "token ids", limits.context_length)
    for each in lists:
        check_token_ids("tokens", each, limits)
    boolean(fields, "skip_special_tokens")


def _check_count(name: str, found: int, what: str, most: int) -> None:
    if found > most:
        raise InvalidField(f"{name} has {found} {what}; at most {most} are accepted in one request", param=name)


def _under_both_names(answer: bytes) -> bytes:
    """Add the answer's fields under both servers' names. Takes little time, linear in the answer's size."""
    text = msgspec.json.decode(answer, type=_Text).text
    return msgspec.json.encode({"text": text, "prompt": text})
