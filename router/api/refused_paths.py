"""Paths that other servers offer and this one does not, with the reason. All other unknown paths are a plain 404."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.errors import NotOffered

REASONS = {
    "/v1/rerank": "SGLang reranks with cross-encoders and with models that are trained for it, in modes of their own; "
    "/v1/score gives the probabilities of label tokens for each document, under an adapter",
    "/v1/classify": "SGLang classifies in a mode of its own, in which an engine does not generate; /v1/score gives the "
    "probabilities of label tokens, under an adapter",
}
_RESPONSES = "/v1/responses/"
_NOT_STORED = "responses are not stored; POST /v1/responses answers at once, and takes the whole conversation as input"


def routes() -> list[Route]:
    return [
        *(Route(path, _refuse, methods=["GET", "POST"]) for path in REASONS),
        Route(f"{_RESPONSES}{{id:path}}", _refuse, methods=["GET", "POST", "DELETE"]),
    ]


async def _refuse(request: Request) -> Response:
    path = request.url.path
    reason = _NOT_STORED if path.startswith(_RESPONSES) else REASONS[path]
    raise NotOffered(f"{path[:100]} is not offered: {reason}")
