"""JSON Schemas of answers. They list the fields that clients may rely on; engines may add others."""

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


def _kind(name: str | bool) -> Schema:
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
    text_offset=_list(_COUNT),
)
_MESSAGE = _object({"content": _maybe(_TEXT), "tool_calls": _maybe(_list(_by_name(_ANY)))}, role=_TEXT)
_POSITIONS, _TRAINED = {"enum": ["prefill", "all"]}, {"enum": ["prefill", "all", None]}  # null: the same ones
_CONTENT = {"number": _COUNT, "revision": _NAME, "kinds": _list(_TEXT), "positions": _POSITIONS,
            "trained_positions": _TRAINED, "base_model": _TEXT, "bytes": _COUNT, "stored": _FLAG}  # fmt: skip
_ADAPTER = {"object": _kind("adapter"), "name": _NAME, "tenant": _NAME, "created_at": _TEXT,
            "deleted_at": _maybe(_TEXT), "latest": _object(**_CONTENT)}  # fmt: skip
_REVISION = {**_CONTENT, "object": _kind("adapter.revision"), "name": _NAME, "tenant": _NAME, "not_served": _TEXT,
             "warnings": _list(_TEXT), "created_at": _TEXT, "alias": _NAME}  # fmt: skip
_ON_WORKERS = _by_name({"anyOf": [_SECONDS, _object(error=_object(code=_NAME, message=_TEXT))]})

_ITEM_STATUS = {"enum": ["in_progress", "completed", "incomplete"]}
_OUTPUT_ITEM = {
    "anyOf": [
        _object(
            type=_kind("message"),
            id=_NAME,
            status=_ITEM_STATUS,
            role=_kind("assistant"),
            content=_list(_object(type=_kind("output_text"), text=_TEXT, annotations=_list(_ANY))),
        ),
        _object(
            type=_kind("reasoning"),
            id=_NAME,
            status=_ITEM_STATUS,
            summary=_list(_ANY),
            content=_list(_object(type=_kind("reasoning_text"), text=_TEXT)),
        ),
        _object(
            type=_kind("function_call"),
            id=_NAME,
            status=_ITEM_STATUS,
            call_id=_NAME,
            name=_TEXT,
            arguments=_TEXT,
        ),
    ]
}
_RESPONSE_EVENTS = (
    "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed",
    "response.output_item.added", "response.output_item.done", "response.content_part.added",
    "response.content_part.done", "response.output_text.delta", "response.output_text.done",
    "response.reasoning_text.delta", "response.reasoning_text.done", "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
)  # fmt: skip

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
    "Response": _object(
        id=_NAME,
        object=_kind("response"),
        created_at=_COUNT,
        model=_NAME,
        system_fingerprint=_NAME,
        status={"enum": ["in_progress", "completed", "incomplete", "failed"]},
        output=_list(_OUTPUT_ITEM),
        error=_maybe(_object(code=_kind("server_error"), message=_TEXT, reason=_NAME)),
        incomplete_details=_maybe(_object(reason={"enum": ["max_output_tokens", "content_filter"]})),
        usage=_maybe(
            _object(
                input_tokens=_COUNT,
                input_tokens_details=_object(cached_tokens=_COUNT),
                output_tokens=_COUNT,
                output_tokens_details=_object(reasoning_tokens=_COUNT),
                total_tokens=_COUNT,
            )
        ),
        instructions=_maybe(_TEXT),
        max_output_tokens=_maybe(_COUNT),
        metadata=_by_name(_TEXT),
        parallel_tool_calls=_FLAG,
        previous_response_id={"type": "null"},
        store=_kind(False),
        background=_kind(False),
        truncation=_kind("disabled"),
        temperature=_maybe({"type": "number"}),
        top_p=_maybe({"type": "number"}),
        text=_object(format=_object(type=_NAME), verbosity=_NAME),
        tool_choice={"anyOf": [_NAME, _object(type=_kind("function"), name=_NAME)]},
        tools=_list(_object(type=_kind("function"), name=_NAME, strict=_FLAG)),
    ),
    "ResponseEvent": _object(
        {
            "response": _ref("Response"),
            "item_id": _NAME,
            "output_index": _COUNT,
            "content_index": _COUNT,
            "delta": _TEXT,
            "text": _TEXT,
            "arguments": _TEXT,
        },
        type={"enum": [*_RESPONSE_EVENTS]},
        sequence_number=_COUNT,
    ),
    "Score": _object(
        **_SIGNED,
        object=_kind("scoring"),
        scores=_list(_list({"type": "number", "minimum": 0, "maximum": 1.000001})),
        usage=_ref("Usage"),
    ),
    "Embeddings": _object(
        **_SIGNED,
        object=_kind("list"),
        data=_list(
            _object(
                index=_COUNT,
                object=_kind("embedding"),
                embedding={"anyOf": [_list({"type": "number", "minimum": -1.000001, "maximum": 1.000001}), _NAME]},
            )
        ),
        usage=_ref("Usage"),
    ),
    "Tokens": _object(
        tokens={"anyOf": [_list(_COUNT), _list(_list(_COUNT))]},
        count={"anyOf": [_COUNT, _list(_COUNT)]},
        max_model_len={"type": "integer"},
    ),
    "Text": _object(text={"anyOf": [_TEXT, _list(_TEXT)]}, prompt={"anyOf": [_TEXT, _list(_TEXT)]}),
    "Model": _object(
        {"positions": _POSITIONS, "trained_positions": _TRAINED},  # of adapters
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
