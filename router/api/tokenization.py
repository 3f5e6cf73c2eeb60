"""POST /v1/tokenize and /v1/detokenize, also without /v1: text to token ids and back, by any engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.errors import InvalidField
from router.generation.backends import Backends
from router.generation.tokenizer_calls import DETOKENIZE, TOKENIZE, ask_tokenizer
from router.identity.access import principal_of
from router.protocol.field_values import MAX_TEXTS, boolean, check_token_ids, decoded, reference
from router.protocol.fields import ADAPTER, DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from router.protocol.request_body import ClientGone, Fields, split
from router.protocol.rules import RULES
from router.protocol.validation import known_fields
from router.revisions.adapter_service import resolve

_PATHS = {TOKENIZE: ("/v1/tokenize", "/tokenize"), DETOKENIZE: ("/v1/detokenize", "/detokenize")}


class _Text(msgspec.Struct):
    text: msgspec.Raw  # a string or a list of them, passed on as it is


def _under_both_names(answer: bytes) -> bytes:
    """Add the answer's fields under both servers' names. Takes little time, linear in the answer's size."""
    text = msgspec.json.decode(answer, type=_Text).text
    return msgspec.json.encode({"text": text, "prompt": text})


def _check_count(name: str, found: int, what: str, most: int) -> None:
    if found > most:
        raise InvalidField(f"{name} has {found} {what}; at most {most} are accepted in one request", param=name)


class TokenizationEndpoint:
    """The two endpoints. Adapters do not change the tokenizer, so `model` only has to exist."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._bodies = backends.bodies
        self._limits = backends.limits

    @property
    def routes(self) -> list[Route]:
        return [
            *(Route(path, self.tokenize, methods=["POST"]) for path in _PATHS[TOKENIZE]),
            *(Route(path, self.detokenize, methods=["POST"]) for path in _PATHS[DETOKENIZE]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """The ids of `prompt`, a string or a list of them, or of `messages` in the chat template."""
        return await self._answer(request, TOKENIZE, TOKENIZE_FIELDS, self._check_text)

    async def detokenize(self, request: Request) -> Response:
        """The text of `tokens`, as `text` (SGLang's name) and as `prompt` (vLLM's)."""
        return await self._answer(request, DETOKENIZE, DETOKENIZE_FIELDS, self._check_tokens)

    def _check_text(self, fields: Fields) -> None:
        if ("prompt" in fields) == ("messages" in fields):
            raise InvalidField("prompt or messages is required, and not both", param="prompt")
        for name in fields.keys() & RULES.keys() - {"prompt"}:
            RULES[name](fields, name, self._limits)
        if "prompt" in fields:
            self._limits.check_prompt_size("prompt", len(memoryview(fields["prompt"])))
            prompt = decoded(fields, "prompt", str | list[str], "a string or a list of strings")
            if prompt == []:
                raise InvalidField("prompt must not be empty", param="prompt")
            if isinstance(prompt, list):
                _check_count("prompt", len(prompt), "strings", MAX_TEXTS)
        boolean(fields, "add_special_tokens")

    def _check_tokens(self, fields: Fields) -> None:
        expected = "a list of token ids, or a list of such lists"
        if "tokens" not in fields:
            raise InvalidField(f"tokens is required: {expected}", param="tokens")
        self._limits.check_prompt_size("tokens", len(memoryview(fields["tokens"])))
        has_lists = bytes(memoryview(fields["tokens"])[1:64]).lstrip()[:1] == b"["
        ids = decoded(fields, "tokens", list[list[int]] if has_lists else list[int], expected)
        if has_lists:
            _check_count("tokens", len(ids), "lists", MAX_TEXTS)
        lists = ids if has_lists else [ids]
        _check_count("tokens", sum(map(len, lists)), "token ids", self._limits.context_length)
        for each in lists:
            check_token_ids("tokens", each, self._limits)
        boolean(fields, "skip_special_tokens")

    async def _answer(
        self, request: Request, path: str, known: frozenset[str], check: Callable[[Fields], None]
    ) -> Response:
        config, headers = self._backends.config, dict(request.scope["headers"])
        principal = principal_of(request.scope)
        with (
            self._backends.quotas.admission(principal) as admission,
            self._bodies.share(principal.confined_to) as share,
        ):
            try:
                body = await share.read(
                    headers,
                    request.receive,
                    max_bytes=config.max_body_bytes,
                    timeout_s=config.body_timeout_s,
                    on_bytes=admission.take_bytes,
                )
            except ClientGone:
                return Response()  # for nobody
            fields = await self._bodies.decode(self._decode, path, body, known, check, num_bytes=len(body))
            base = self._backends.model
            model, adapter = reference(fields, "model") or base, reference(fields, ADAPTER)
            await resolve(model, adapter, base, self._backends.adapters, principal)
            answer = await self._ask(request, path, {name: value for name, value in fields.items() if name in known})
        if path == TOKENIZE:
            return Response(answer, media_type="application/json")
        twice = await self._bodies.decode(_under_both_names, answer, num_bytes=len(answer))
        return Response(twice, media_type="application/json")

    def _decode(self, path: str, body: bytes, known: frozenset[str], check: Callable[[Fields], None]) -> Fields:
        """The request's fields, without those that are null. Raises RequestError."""
        given = split(body, self._limits.request.nesting)
        fields = known_fields(path, given, known | {"model", ADAPTER}, {})
        checked = {name: value for name, value in fields.items() if name in known}
        check(checked)  # puts the engines' form of some values in their place
        return {**fields, **checked}

    async def _ask(self, request: Request, path: str, fields: Fields) -> bytes:
        body: dict[str, Any] = {**fields, "model": self._backends.model}
        return await ask_tokenizer(
            self._backends, path, msgspec.json.encode(body), f"tok-{request.scope['request_id']}"
        )
