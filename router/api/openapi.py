"""GET /openapi.json: an OpenAPI 3.1 document of this router, made from its routes and from the code's own tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from adapters.errors import AdapterError
from router.api.answer_schemas import ANSWERS
from router.errors import RouterError
from router.protocol.field_values import Limits
from router.protocol.request_schemas import request_schemas

PATH = "/openapi.json"
_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")
_JSON = "application/json"
_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Operation:
    """The inputs and outputs of a route. A value with a slash is a content type, any other the name of a schema."""

    summary: str
    answer: str = ""  # empty: it only refuses
    takes: str = ""
    streams: str = ""  # the schema of each event's data but [DONE], the last of all but responses'
    status: int = 200
    query: tuple[str, ...] = ()


_ONE = "/v1/adapters/{name}"
_UPLOAD = "multipart/form-data"

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Continue a conversation", "ChatCompletion", "ChatRequest", "ChatCompletionChunk"
    ),
    ("POST", "/v1/completions"): Operation(
        "Continue prompts, or read them for their log-probabilities", "Completion", "CompletionRequest",
        "CompletionChunk",
    ),
    ("POST", "/v1/score"): Operation("Probabilities of tokens after prompts", "Score", "ScoreRequest"),
    ("POST", "/v1/responses"): Operation(
        "Continue a conversation, as OpenAI's Responses API has it, without storing anything", "Response",
        "ResponseRequest", "ResponseEvent",
    ),
    ("POST", "/v1/embeddings"): Operation("Prompts as vectors", "Embeddings", "EmbeddingsRequest"),
    ("POST", "/v1/tokenize"): Operation("Token ids of texts or of a conversation", "Tokens", "TokenizeRequest"),
    ("POST", "/tokenize"): Operation("As /v1/tokenize", "Tokens", "TokenizeRequest"),
    ("POST", "/v1/detokenize"): Operation("The text of token ids", "Text", "DetokenizeRequest"),
    ("POST", "/detokenize"): Operation("As /v1/detokenize", "Text", "DetokenizeRequest"),
    **{
        (method, path): Operation("Not offered; the answer says why")
        for path in ("/v1/rerank", "/v1/classify")
        for method in ("GET", "POST")
    },
    **{
        (method, "/v1/responses/{id}"): Operation("Not offered: responses are not stored")
        for method in ("GET", "POST", "DELETE")
    },
    ("GET", "/v1/models"): Operation("The base model and a page of usable adapters", "Models", query=("after",)),
    ("GET", "/v1/models/{id}"): Operation("One model, by any name that a request may use", "Model"),
    ("GET", "/health"): Operation("200 while the router lives", "Health"),
    ("GET", "/ready"): Operation("200 when a request could be served now, else 503", "Ready"),
    ("GET", PATH): Operation("This document", _JSON),
    ("GET", "/v1/adapters"): Operation(
        "A page of adapters", "Adapters", query=("tenant", "prefix", "after", "limit", "deleted")
    ),
    ("POST", "/v1/adapters"): Operation("Import files as a revision", "AdapterRevision", _UPLOAD, status=201),
    ("GET", _ONE): Operation("An adapter, its aliases and newest revisions", "AdapterDetails", query=("limit",)),
    ("DELETE", _ONE): Operation("Delete an adapter; it can be restored", "AdapterDeletion"),
    ("GET", f"{_ONE}/export"): Operation("A revision's files", "application/x-tar", query=("reference",)),
    ("POST", f"{_ONE}/push"): Operation(
        "Import files, load them where the old revision is, and move the alias", "PushedRevision", _UPLOAD
    ),
    ("POST", f"{_ONE}/restore"): Operation("Undo a deletion", "AdapterDeletion"),
    ("POST", f"{_ONE}/rollback"): Operation("Point an alias at its previous revision", "AliasMove", _JSON),
    ("GET", f"{_ONE}/aliases/{{alias}}"): Operation("An alias's moves, newest first", "AliasMoves", query=("limit",)),
    ("PUT", f"{_ONE}/aliases/{{alias}}"): Operation("Point an alias at a revision", "AliasMove", _JSON),
    **{
        ("POST", f"{_ONE}/{verb}"): Operation(f"{verb.capitalize()} a revision on workers", "OnWorkers", _JSON)
        for verb in ("prewarm", "pin", "unpin", "evict")
    },
    ("POST", "/v1/load_lora_adapter"): Operation("Import a directory, as vLLM does", "text/plain", _JSON),
    ("POST", "/v1/unload_lora_adapter"): Operation("Delete an adapter, as vLLM does", "text/plain", _JSON),
}  # fmt: skip


# Of the admin listener.
ADMIN_OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/health"): Operation("200 while the router lives", "Health"),
    ("GET", "/ready"): Operation("As the router's, with placements and the reason for each worker", "ReadyInDetail"),
    ("GET", "/metrics"): Operation("Metrics for Prometheus", "text/plain"),
    ("GET", "/debug/requests"): Operation("Every request in flight and its phase", "RequestsInFlight"),
    ("GET", "/debug/placement"): Operation(
        "Where a request would go now, and why", _JSON, query=("adapter", "prompt_tokens", "answer_tokens")
    ),
    ("GET", "/console"): Operation("The console, a page for browsers", "text/html"),
    ("GET", "/console/state"): Operation("The fleet and the requests in flight, for the console", _JSON),
}


def operations_of(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Method and path of each operation. HEAD is not counted: it comes with GET."""
    for route in routes:
        assert isinstance(route, Route)
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in sorted((route.methods or {"POST"}) - {"HEAD"}):
            yield method, path


def document(limits: Limits, version: str) -> dict[str, Any]:
    """The document."""
    schemas = {**ANSWERS, **request_schemas(limits)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Prelude", "version": version},
        "paths": _paths(OPERATIONS),
        "x-admin-paths": _paths(ADMIN_OPERATIONS),
        "components": {"schemas": schemas},
        "x-error-codes": error_codes(),
    }


def _paths(operations: Mapping[tuple[str, str], Operation]) -> dict[str, dict[str, Any]]:
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in operations.items():
        paths.setdefault(path, {})[method.lower()] = _described(path, operation)
    return paths


def error_codes() -> dict[str, list[int]]:
    """All error codes of the router with their HTTP statuses. Workers add further codes that begin with `adapter_`."""
    found: dict[str, set[int]] = {"context_length_exceeded": {400}, "engine_busy": {503}}  # set on instances
    kinds: list[type[RouterError] | type[AdapterError]] = [RouterError, AdapterError]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        found.setdefault(kind.code, set()).add(kind.http_status)
    return {code: sorted(statuses) for code, statuses in sorted(found.items())}


def route(limits: Limits, version: str) -> Route:
    """Serves the document."""
    body = msgspec.json.encode(document(limits, version))

    async def openapi(_: Request) -> Response:
        return Response(body, media_type=_JSON)

    return Route(PATH, openapi)


def _described(path: str, operation: Operation) -> dict[str, Any]:
    names = [match[1] for match in _PARAMETER.finditer(path)]
    responses: dict[str, Any] = {}
    if operation.answer:
        content = _content(operation.answer)
        if operation.streams:
            content[_STREAM] = {"schema": _ref(operation.streams)}
        responses[str(operation.status)] = {"description": operation.summary, "content": content}
        if path == "/ready":
            responses["503"] = {"description": "No request could be served now", "content": content}
    error = {"content": _content("Error")}
    responses |= {
        "4XX": {"description": "A mistake of the client, or what this cluster cannot serve", **error},
        "5XX": {"description": "A failure of the cluster; 503 has retry-after", **error},
    }
    described: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": [*_parameters("path", names), *_parameters("query", operation.query)],
        "responses": responses,
    }
    if operation.takes:
        described["requestBody"] = {"required": operation.takes != _JSON, "content": _content(operation.takes)}
    return described


def _parameters(place: str, names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}} for name in names]


def _content(name: str) -> dict[str, Any]:
    if "/" in name:
        return {name: {}}
    return {_JSON: {"schema": _ref(name)}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
