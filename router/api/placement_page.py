"""GET /debug/placement: where a request would go now, and why."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from adapters.scopes import Scope
from router.errors import InvalidField
from router.generation.backends import Backends
from router.identity.gate import Gate, check_scope
from router.placement.explanation import explained
from router.placement.request import PlacementRequest, PromptSize
from router.protocol.json_answer import json_answer
from router.revisions.adapter_service import reference_in

_TOKENS = {"prompt_tokens": 500, "answer_tokens": 256}  # with their defaults
_MAX_TOKENS = 2**31 - 1


class PlacementPage:
    """Explains placements. Places nothing and loads nothing."""

    def __init__(self, backends: Backends, gate: Gate) -> None:
        self._backends = backends
        self._adapters = backends.adapters
        self._gate = gate

    @property
    def routes(self) -> list[Route]:
        return [Route("/debug/placement", self.placement)]

    async def placement(self, request: Request) -> Response:
        """Query: `adapter` (default: the base model), `prompt_tokens`, and `answer_tokens` to reserve room for.

        Where the router asks for keys, an adapter needs one that may use it.
        """
        prompt_tokens, answer_tokens = (_number(request, name, default) for name, default in _TOKENS.items())
        revision, adapter = None, request.query_params.get("adapter")
        reference = reference_in(self._backends.model, adapter, self._backends.model)
        if reference is not None:
            # This listener asks for no key, but what adapters there are is for those who may use them.
            scope: Any = request.scope
            principal = self._gate.known(scope) or await self._gate.verified(scope)
            check_scope(principal, Scope.INFER)
            revision = await self._adapters.resolve_for(principal, reference)
        size = PromptSize(prompt_tokens, prompt_tokens + answer_tokens)
        observed = self._backends.placer.observe(PlacementRequest.of(revision, size=size))
        return json_answer(explained(observed, self._backends.fleet.state, self._backends.placer.policy))


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and int(text[:11]) <= _MAX_TOKENS):
        raise InvalidField(f"{name} must be an integer from 0 to {_MAX_TOKENS} (found {text[:40]!r})", param=name)
    return int(text)
