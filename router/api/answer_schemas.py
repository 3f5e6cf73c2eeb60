"""JSON Schemas of answers. They name what clients may rely on; engines may add to it."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_SECONDS: Schema = {"type": "number", "minimum": 0}
_FLAG: Schema = {"type": "boolean"}
_ANY: Schema = {}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _by_name(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(optional: dict[str, Schema] | None = None, /, **required: Schema) -> Schema:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": sorted(required)}


def _kind(name: str) -> Schema:
    return {"const": name}


_USAGE = _object(
    {"prompt_tokens_details": _maybe(_by_name(_maybe(_COUNT))), "completion_tokens": _maybe(_COUNT)},
    prompt_tokens=_COUNT,
    total_tokens=_COUNT,
)
_SIGNED = {"id": _NAME, "model": _NAME, "created": _COUNT, "system_fingerprint": _NAME}
_FINISH = _maybe({"enum": ["stop", "length", "tool_calls", "content_filter", "abort"]})
_COMPLETION_LOGPROBS = _object(
    tokens=_list(_TEXT),
    token_logprobs=_list(_maybe({"type": "number"})),
    top_logprobs=_list(_maybe(_by_name({"type": "number"}))),
    text_offset=_list({"type": "integer"}),
)
_MESSAGE = _object({"content": _maybe(_TEXT), "tool_calls": _maybe(_list(_by_name(_ANY)))}, role=_TEXT)
_CONTENT = {"number": _COUNT, "revision": _NAME, "kinds": _list(_TEXT), "positions": {"enum": ["prefill", "all"]},
            "base_model": _TEXT, "bytes": _COUNT, "stored": _FLAG}  # fmt: skip
_ADAPTER = {"object": _kind("adapter"), "name": _NAME, "tenant": _NAME, "created_at": _TEXT,
            "deleted_at": _maybe(_TEXT), "latest": _object(**_CONTENT)}  # fmt: skip
_REVISION = {**_CONTENT, "object": _kind("adapter.revision"), "name": _NAME, "tenant": _NAME, "not_served": _TEXT,
             "created_at": _TEXT, "alias": _NAME}  # fmt: skip
_ON_WORKERS = _by_name({"anyOf": [_SECONDS, _object(error=_object(code=_NAME, message=_TEXT))]})

ANSWERS: dict[str, Schema] = {
    "Error": _object(error=_object(message=_NAME, type=_NAME, param=_maybe(_TEXT), code=_NAME)),
    "Usage": _USAGE,
    "ChatCompletion": _object(
        **_SIGNED,
        object=_kind("chat.completion"),
        choices=_list(_object(index=_COUNT, message=_MESSAGE, finish_reason=_FINISH)),
        usage=_ref("Usage"),
    ),
    "ChatCompletionChunk": _object(
        {"usage": _maybe(_ref("Usage"))},
        **_SIGNED,
        object=_kind("chat.completion.chunk"),
        choices=_list(_object({"finish_reason": _FINISH}, index=_COUNT, delta=_by_name(_ANY))),
    ),
    "Completion": _object(
        **_SIGNED,
        object=_kind("text_completion"),
        choices=_list(_object(index=_COUNT, text=_TEXT, finish_reason=_FINISH, logprobs=_maybe(_COMPLETION_LOGPROBS))),
        usage=_ref("Usage"),
    ),
    "CompletionChunk": _object(
        {"usage": _maybe(_ref("Usage"))},
        **_SIGNED,
        object=_kind("text_completion"),
        choices=_list(_object({"finish_reason": _FINISH}, index=_COUNT, text=_TEXT)),
    ),
    "Score": _object(
        **_SIGNED,
        object=_kind("scoring"),
        scores=_list(_list({"type": "number", "minimum": 0, "maximum": 1.000001})),
        usage=_ref("Usage"),
    ),
    "Tokens": _object(
        tokens={"anyOf": [_list(_COUNT), _list(_list(_COUNT))]},
        count={"anyOf": [_COUNT, _list(_COUNT)]},
        max_model_len={"type": "integer"},
    ),
    "Text": _object(text={"anyOf": [_TEXT, _list(_TEXT)]}, prompt={"anyOf": [_TEXT, _list(_TEXT)]}),
    "Model": _object(
        id=_NAME, object=_kind("model"), created=_COUNT, owned_by=_NAME, root=_NAME, parent=_maybe(_NAME)
    ),
    "Models": _object(object=_kind("list"), data=_list(_ref("Model")), has_more=_FLAG, last_id=_NAME),
    "Health": _object(status=_kind("alive")),
    "Ready": _object(ready=_FLAG, reason=_TEXT),
    "ReadyInDetail": _object(
        ready=_FLAG,
        reason=_TEXT,
        placements=_list(_NAME),
        workers=_by_name(_object(role={"enum": ["prefill", "decode", "unified"]}, ready=_FLAG, reason=_TEXT)),
    ),
    "RequestsInFlight": _object(
        requests=_list(
            _object(
                {"adapter": _maybe(_NAME), "revision": _maybe(_NAME)},
                request_id=_NAME,
                endpoint=_NAME,
                age_s=_SECONDS,
                streaming=_FLAG,
                sequences=_list(
                    _object(phase=_NAME, prefill=_maybe(_NAME), decode=_maybe(_NAME), attempts=_COUNT),
                ),
            )
        )
    ),
    "Adapters": _object(
        object=_kind("list"), data=_list(_object(**_ADAPTER)), has_more=_FLAG, last_id=_maybe(_NAME)
    ),
    "AdapterDetails": _object(
        **_ADAPTER,
        aliases=_by_name(_COUNT),
        revisions=_list(
            _object(
                **_CONTENT,
                created_at=_TEXT,
                workers=_maybe(
                    _object(
                        host=_list(_NAME),
                        disk=_list(_NAME),
                        memory_only=_list(_NAME),
                        num_host=_COUNT,
                        num_disk=_COUNT,
                        num_memory_only=_COUNT,
                    )
                ),
            )
        ),
        num_revisions=_COUNT,
        workers=_object(host=_list(_NAME), disk=_list(_NAME)),
    ),
    "AdapterRevision": _object(**_REVISION),
    "PushedRevision": _object(**_REVISION, seconds=_SECONDS, workers=_ON_WORKERS),
    "AliasMove": _object(
        object=_kind("adapter.alias"),
        name=_NAME,
        alias=_NAME,
        from_number=_maybe(_COUNT),
        number=_COUNT,
        moved_at=_TEXT,
        moved_by=_TEXT,
    ),
    "AliasMoves": _object(object=_kind("list"), data=_list(_ref("AliasMove")), has_more=_FLAG),
    "AdapterDeletion": _object(object=_kind("adapter"), name=_NAME, deleted=_FLAG),
    "OnWorkers": _object(name=_NAME, number=_COUNT, revision=_NAME, workers=_ON_WORKERS),
}  # fmt: skip
