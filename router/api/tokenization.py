"""POST /v1/tokenize and /v1/detokenize, also without /v1: text to token ids and back, by any engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.errors import InvalidField, RefusedField
from router.generation.backends import Backends
from router.generation.tokenizer_calls import DETOKENIZE, TOKENIZE, ask_tokenizer
from router.protocol.field_values import Limits, boolean, check_token_ids, decoded, string
from router.protocol.fields import ADAPTER, DETOKENIZE_FIELDS, REFUSED, TOKENIZE_FIELDS
from router.protocol.json_answer import json_answer
from router.protocol.request_body import ClientGone, Fields, read_body, split
from router.protocol.rules import RULES
from router.revisions.adapter_service import AdapterService
from router.revisions.resolve import resolve

_NULL = msgspec.Raw(b"null")
_PATHS = {TOKENIZE: ("/v1/tokenize", "/tokenize"), DETOKENIZE: ("/v1/detokenize", "/detokenize")}


@dataclass(frozen=True, slots=True)
class _Named:
    model: str
    adapter: str | None


class TokenizationEndpoint:
    """Adapters change no tokenizer, so a model's name only has to exist."""

    def __init__(self, backends: Backends, adapters: AdapterService, limits: Limits) -> None:
        self._backends = backends
        self._adapters = adapters
        self._limits = limits

    @property
    def routes(self) -> list[Route]:
        return [
            *(Route(path, self.tokenize, methods=["POST"]) for path in _PATHS[TOKENIZE]),
            *(Route(path, self.detokenize, methods=["POST"]) for path in _PATHS[DETOKENIZE]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """The ids of `prompt`, a string or a list of them, or of `messages` in the chat template."""
        fields = await self._fields(request, TOKENIZE_FIELDS)
        if ("prompt" in fields) == ("messages" in fields):
            raise InvalidField("prompt or messages is required, and not both", param="prompt")
        if "messages" in fields:
            for name in fields.keys() & RULES.keys() - {"prompt"}:
                RULES[name].check(fields, name, self._limits)
        else:
            self._limits.check_prompt_size("prompt", len(memoryview(fields["prompt"])))
            prompt = decoded(fields, "prompt", str | list[str], "a string or a list of strings")
            if prompt == []:
                raise InvalidField("prompt must not be empty", param="prompt")
        boolean(fields, "add_special_tokens")
        answer = await self._ask(request, TOKENIZE, fields)
        return Response(answer, media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """The text of `tokens`, as `text` (SGLang's name) and as `prompt` (vLLM's)."""
        fields = await self._fields(request, DETOKENIZE_FIELDS)
        expected = "a list of token ids, or a list of such lists"
        if "tokens" not in fields:
            raise InvalidField(f"tokens is required: {expected}", param="tokens")
        self._limits.check_prompt_size("tokens", len(memoryview(fields["tokens"])))
        has_lists = bytes(memoryview(fields["tokens"])[1:64]).lstrip()[:1] == b"["
        ids = decoded(fields, "tokens", list[list[int]] if has_lists else list[int], expected)
        for each in ids if has_lists else [ids]:
            check_token_ids("tokens", each, self._limits)
        boolean(fields, "skip_special_tokens")
        text = msgspec.json.decode(await self._ask(request, DETOKENIZE, fields))["text"]
        return json_answer({"text": text, "prompt": text})

    async def _fields(self, request: Request, known: frozenset[str]) -> Fields:
        """The request's fields without nulls and without `model` and `adapter`, which must exist if they are given."""
        config = self._backends.config
        try:
            headers = dict(request.scope["headers"])
            body = await read_body(
                headers, request.receive, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
            )
        except ClientGone:
            return {}
        fields = {}
        for name, value in split(body, self._limits.request.nesting).items():
            if value == _NULL:
                continue
            if name in REFUSED:
                raise RefusedField(f"{name} is not for clients to set; remove it", param=name)
            if name not in known and name not in ("model", ADAPTER):
                raise InvalidField(
                    f"{name[:60]} is not a field of this request; it takes {', '.join(sorted(known))}", param=name[:60]
                )
            fields[name] = value
        base = self._backends.model
        named = _Named(string(fields, "model") or base, string(fields, ADAPTER))
        await resolve(named, base, self._adapters)
        return {name: value for name, value in fields.items() if name in known}

    async def _ask(self, request: Request, path: str, fields: Fields) -> bytes:
        body: dict[str, Any] = {**fields, "model": self._backends.model}
        return await ask_tokenizer(
            self._backends, path, msgspec.json.encode(body), f"tok-{request.scope['request_id']}"
        )
