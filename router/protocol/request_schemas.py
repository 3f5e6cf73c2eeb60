"""JSON Schemas of the inference requests, made from the tables by which they are validated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from router.protocol.field_values import MAX_TEXTS, Limits
from router.protocol.fields import (
    ADAPTER,
    DETOKENIZE_FIELDS,
    EMBEDDINGS,
    NOT_OFFERED,
    REFUSED,
    SCORE,
    TOKENIZE_FIELDS,
)
from router.protocol.messages import PARTS, ROLES
from router.protocol.prefill_only.embeddings import ENCODINGS
from router.protocol.prefill_only.scoring import MAX_LABELS
from router.protocol.responses import fields as responses
from router.protocol.responses import request as response_request
from router.protocol.responses.input_items import ITEMS
from router.protocol.responses.input_items import ROLES as ITEM_ROLES
from router.protocol.rules import INT32_MAX, MAX_TOP_LOGPROBS, RULES
from router.protocol.validation import FIELDS, Endpoint

Schema = dict[str, Any]

BOOLEAN: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string", "minLength": 1}
_EXACT = ("chat_template_kwargs",)  # the template gets its nulls
_REFUSED: Schema = {"type": "null", "description": "Refused: it reaches into the engine."}
_ANY: Schema = {}


def request_schemas(limits: Limits) -> dict[str, Schema]:
    """By name, for the component section of an OpenAPI document."""
    token = {"type": "integer", "minimum": 0, "maximum": limits.vocabulary - 1}
    tokens = {"type": "array", "items": token}
    prompt = {"anyOf": [TEXT, {**tokens, "minItems": 1}]}
    prompts = [{"type": "array", "items": each, "minItems": 1} for each in prompt["anyOf"]]
    num_logprobs = _range(0, min(MAX_TOP_LOGPROBS, limits.vocabulary))
    named = {
        "model": {**TEXT, "description": "The base model, an adapter, or base:adapter."},
        ADAPTER: {**TEXT, "description": "name, name@alias, name@r7 or name@sha256:…"},
    }
    rules = {name: rule.schema(limits) for name, rule in RULES.items()} | named | {"top_logprobs": num_logprobs}
    rules["n"] = _range(1, limits.max_choices)
    part = {"type": "object", "properties": {"type": {"enum": [*PARTS]}}, "required": ["type"]}
    content = {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": part}]}
    others = {"properties": {"role": {"pattern": _any_case([role for role in ROLES if role != "user"])}}}
    has_content = {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]}
    messages = {
        "type": "array",
        "minItems": 1,
        "maxItems": limits.request.messages,
        "items": {
            "type": "object",
            "properties": {"role": {"type": "string", "pattern": _any_case(ROLES)}, "content": content},
            "required": ["role"],
            "anyOf": [others, has_content],
        },
    }
    rules["messages"] = messages
    chat = {name: rules[name] for name in FIELDS[Endpoint.CHAT]} | {
        "max_tokens": _range(1, INT32_MAX),
        "logprobs": BOOLEAN,
    }
    # Values that depend on each other (`echo` with `stream`, `n` with `prompt`, …) are not in the schemas.
    completion = {name: rules[name] for name in FIELDS[Endpoint.COMPLETIONS]} | {
        "prompt": {"anyOf": [*prompt["anyOf"], *prompts]},
        "max_tokens": {**_range(0, INT32_MAX), "description": "0: only the prompt is read"},
        "logprobs": num_logprobs,
        "best_of": {**_range(1, limits.max_choices), "description": "must equal n"},
    }
    is_left_out = {"properties": {"stream_options": {"type": "null"}}}
    is_streamed = {"properties": {"stream": {"const": True}}, "required": ["stream"]}
    needs_stream = {"stream_options": {"anyOf": [is_left_out, is_streamed]}}
    item = {"anyOf": [{"type": "array", "items": {"type": "string"}, "minItems": 1},
                      {"type": "array", "items": tokens, "minItems": 1}, {"type": "string"}]}  # fmt: skip
    score = {
        **dict.fromkeys(SCORE, _ANY),
        **named,
        "query": {"anyOf": [{"type": "string"}, tokens]},
        "items": {**item, "maxItems": limits.max_choices},
        "label_token_ids": {**tokens, "minItems": 1, "maxItems": MAX_LABELS},
        "apply_softmax": BOOLEAN,
        "item_first": BOOLEAN,
    }
    several = [{**each, "maxItems": limits.max_choices} for each in prompts]
    embeddings = {
        **dict.fromkeys(EMBEDDINGS - {"dimensions"}, _ANY),
        **named,
        "input": {"anyOf": [*prompt["anyOf"], *several]},
        "encoding_format": {"enum": [*ENCODINGS]},
    }
    strings: Schema = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_TEXTS}
    tokenize = {
        **{name: rules[name] for name in TOKENIZE_FIELDS & rules.keys()},
        **named,
        "prompt": {"anyOf": [{"type": "string"}, strings]},
        "messages": messages,
        "add_special_tokens": BOOLEAN,
    }
    one_input = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in ("prompt", "messages")
    ]
    most = {**tokens, "maxItems": limits.context_length}
    detokenize = {
        **named,
        **dict.fromkeys(DETOKENIZE_FIELDS, BOOLEAN),
        "tokens": {"anyOf": [most, {"type": "array", "items": most, "maxItems": MAX_TEXTS}]},  # as many ids in all
    }
    return {
        "ChatRequest": _object(chat, ("model", "messages"), NOT_OFFERED) | {"dependentSchemas": needs_stream},
        "CompletionRequest": _object(completion, ("model", "prompt"), NOT_OFFERED) | {"dependentSchemas": needs_stream},
        "ScoreRequest": _object(score, ("model", "query", "items", "label_token_ids")),
        "EmbeddingsRequest": _object(embeddings, ("model", "input"), ("dimensions",)),
        "TokenizeRequest": _object(tokenize, ()) | {"oneOf": one_input},
        "DetokenizeRequest": _object(detokenize, ("tokens",)),
        "ResponseRequest": _object(_response(rules, limits), ("model", "input"), responses.NOT_OFFERED)
        | {"dependentSchemas": needs_stream},
    }


def _response(rules: Mapping[str, Schema], limits: Limits) -> dict[str, Schema]:
    """The fields of /v1/responses. docs/api.md describes nested ones."""
    item = {
        "type": "object",
        "properties": {"type": {"enum": [*ITEMS, None]}, "role": {"enum": [*ITEM_ROLES]}},
        "anyOf": [{"required": ["type"]}, {"required": ["role", "content"]}],
    }
    function = {
        "type": "object",
        "properties": {"type": {"const": "function"}, "name": TEXT, "description": {"type": ["string", "null"]},
                       "parameters": {"type": ["object", "null"]}, "strict": {"type": ["boolean", "null"]}},
        "required": ["type", "name"],
        "additionalProperties": False,
    }  # fmt: skip
    choice = {
        "type": "object",
        "properties": {"type": {"const": "function"}, "name": TEXT},
        "required": ["type", "name"],
        "additionalProperties": False,
    }
    text_format = {"type": ["object", "null"], "properties": {"type": {"enum": [*response_request.FORMATS]}},
                   "required": ["type"]}  # fmt: skip
    text = {
        "type": "object",
        "properties": {"format": text_format, "verbosity": {"enum": [*response_request.VERBOSITIES, None]}},
        "additionalProperties": False,
    }
    effort = {"anyOf": [{"type": "null"}, rules["reasoning_effort"]]}
    nothing = {"type": "null"}
    return {
        **{name: rules[name] for name in (*responses.SAME_AS_CHAT, *responses.BOOKKEEPING)},
        **{name: {"const": value} for name, (value, _) in responses.FIXED.items()},
        "model": rules["model"],
        ADAPTER: rules[ADAPTER],
        "input": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": item, "minItems": 1, "maxItems": limits.request.messages},
            ]
        },
        "instructions": {"type": "string"},
        "max_output_tokens": _range(1, INT32_MAX),
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
        "tools": {"type": "array", "items": function, "maxItems": limits.request.tools},
        "tool_choice": {"anyOf": [{"enum": ["auto", "required", "none"]}, choice]},
        "text": text,
        "reasoning": {
            "type": "object",
            "properties": {"effort": effort, "summary": nothing, "generate_summary": nothing},
            "additionalProperties": False,
        },
        "stream_options": {
            "type": "object",
            "properties": {"include_obfuscation": {"anyOf": [BOOLEAN, nothing]}},
            "additionalProperties": False,
        },
    }


def _object(properties: Mapping[str, Schema], required: Collection[str], not_offered: Collection[str] = ()) -> Schema:
    """An object whose fields may be null, since clients send null for fields that they leave out."""
    properties = {name: each if name in _EXACT else _with_nulls(each) for name, each in sorted(properties.items())}
    values = {name: each if name in required else _nullable(each) for name, each in properties.items()}
    values |= dict.fromkeys(sorted(REFUSED), _REFUSED) | {key: {"type": "null"} for key in sorted(not_offered)}
    return {"type": "object", "properties": values, "required": [*required], "additionalProperties": False}


def _with_nulls(schema: Schema) -> Schema:
    """A null inside a field is the same as nothing where an object does not need it, or does not know it."""
    if not {"properties", "items", "anyOf"} & schema.keys():
        return schema
    changed = dict(schema)
    if "properties" in schema:
        needed = schema.get("required", ())
        inner = {name: _with_nulls(each) for name, each in schema["properties"].items()}
        changed["properties"] = {name: each if name in needed else _nullable(each) for name, each in inner.items()}
        if schema.get("additionalProperties") is False:
            changed["additionalProperties"] = {"type": "null"}
    if "items" in schema:
        changed["items"] = _with_nulls(schema["items"])
    if "anyOf" in schema:
        changed["anyOf"] = [_with_nulls(each) for each in schema["anyOf"]]
    return changed


def _nullable(schema: Schema) -> Schema:
    return schema if schema is _ANY else {"anyOf": [schema, {"type": "null"}]}


def _range(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _any_case(words: Collection[str]) -> str:
    """A case-insensitive regular expression in syntax that every dialect supports."""
    either = ["".join(f"[{letter}{letter.upper()}]" for letter in word) for word in words]
    return f"^({'|'.join(either)})$"


SCHEMA_OF = {
    Endpoint.CHAT: "ChatRequest",
    Endpoint.COMPLETIONS: "CompletionRequest",
    Endpoint.SCORE: "ScoreRequest",
    Endpoint.RESPONSES: "ResponseRequest",
    Endpoint.EMBEDDINGS: "EmbeddingsRequest",
}
