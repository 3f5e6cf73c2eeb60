"""Paths of other servers that this one does not have, with the reason. Any other path is unknown."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.errors import NotOffered

REASONS = {
    "/v1/embeddings": "SGLang gives embeddings only in a mode of its own (--is-embedding), in which an engine does not "
    "generate; engines here generate. /v1/score and completions with max_tokens 0 read prompts under an adapter",
    "/v1/rerank": "SGLang reranks with cross-encoders and with models that are trained for it, in modes of their own; "
    "/v1/score gives the probabilities of label tokens for each document, under an adapter",
    "/v1/classify": "SGLang classifies in a mode of its own, in which an engine does not generate; /v1/score gives the "
    "probabilities of label tokens, under an adapter",
    "/v1/responses": "SGLang keeps responses in the memory of one engine, but requests here may reach any; "
    "use /v1/chat/completions, whose requests carry the whole conversation",
}


def routes() -> list[Route]:
    return [Route(path, _refuse, methods=["GET", "POST"]) for path in REASONS]


async def _refuse(request: Request) -> Response:
    path = request.url.path
    raise NotOffered(f"{path} is not offered: {REASONS[path]}")
