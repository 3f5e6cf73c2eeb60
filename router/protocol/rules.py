"""The admission contract: every field that a generation request may have, and the values that it may take.

Any other field is a 400 that names it. The OpenAPI document and the table in docs/api.md are made from these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from router.errors import InvalidField
from router.protocol.field_values import (
    Limits,
    boolean,
    check_token_id_field,
    check_token_ids,
    decoded,
    encoded,
    integer,
    number,
    shown,
)
from router.protocol.fields import BOOKKEEPING, CHAT_ONLY, COMPLETIONS_ONLY
from router.protocol.grammars import FORMATS, check_ebnf, check_regex_field, check_response_format, check_schema_text
from router.protocol.messages import TEMPLATE_KWARGS, check_messages, check_template_kwargs, check_tools, must_call
from router.protocol.request_body import Fields

Schema = dict[str, Any]

# Limits of numbers that the engine puts into tensors unchecked; a larger one would crash its scheduler.
INT32_MAX = 2**31 - 1
INTEGERS = {
    "max_completion_tokens": (1, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
    "top_k": (-1, INT32_MAX),
    "seed": (-(2**62), 2**62),
    "max_dynamic_patch": (1, 1024),
    "min_dynamic_patch": (1, 1024),
}
NUMBERS = {  # (least, most, must be above the least)
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.01, 2.0, False),  # logits are divided by it; by 1e-40 they would be infinite
}
BOOLEANS = (
    "stream", "echo", "ignore_eos", "no_stop_trim", "skip_special_tokens", "separate_reasoning", "stream_reasoning",
    "return_cached_tokens_details", "return_token_ids", "return_prompt_token_ids", "parallel_tool_calls",
    "continue_final_message", "use_audio_in_video", "store",
)  # fmt: skip
TEXTS = {  # bytes
    "user": 1024, "task": 32, "service_tier": 64, "safety_identifier": 1024, "prompt_cache_key": 1024,
    "prompt_cache_retention": 64, "verbosity": 64,
}  # fmt: skip
OBJECTS = {"metadata": 16 * 1024, "prediction": 256 * 1024, "reasoning": 1024}  # bytes
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_EFFORT = 0.99
MAX_LOGIT_BIAS = 100.0  # as OpenAI's
MAX_TOP_LOGPROBS = 100

Check = Callable[[Fields, str, Limits], Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one field."""

    check: Check  # raises InvalidField; may put the engines' form of the value in its place
    schema: Callable[[Limits], Schema]
    limits: str  # for the table in docs/api.md


def _boolean(fields: Fields, name: str, _: Limits) -> None:
    boolean(fields, name)


def _text(most: int, fields: Fields, name: str, _: Limits) -> None:
    value = decoded(fields, name, str, "a string")
    if len(memoryview(fields[name])) > most + 2 and len(value.encode()) > most:
        raise InvalidField(f"{name} has over {most} bytes, which is the most that is accepted", param=name)


def _object(most: int, fields: Fields, name: str, _: Limits) -> None:
    if len(memoryview(fields[name])) > most:
        raise InvalidField(f"{name} has over {most} bytes, which is the most that is accepted", param=name)
    decoded(fields, name, dict[str, msgspec.Raw], "an object")


def _integer(least: int, most: int, fields: Fields, name: str, _: Limits) -> None:
    integer(fields, name, least, most)


def _top_k(fields: Fields, name: str, _: Limits) -> None:
    if integer(fields, name, *INTEGERS[name]) == 0:
        fields[name] = msgspec.Raw(b"-1")  # both mean all tokens; engines know -1 alone


def _number(least: float, most: float, is_above: bool, fields: Fields, name: str, _: Limits) -> None:
    number(fields, name, least, most, is_above=is_above)


def _stop(fields: Fields, name: str, limits: Limits) -> None:
    raw, most = fields[name], limits.request
    if len(memoryview(raw)) > 6 * most.stop_bytes + 16 * most.stops + 16:  # before it is decoded
        raise InvalidField(f"{name} is too long: at most {most.stop_bytes} bytes are accepted", param=name)
    found = decoded(fields, name, str | list[str], "a string or a list of strings")
    texts = [found] if isinstance(found, str) else found
    if len(texts) > most.stops:
        raise InvalidField(f"{name} has {len(texts)} strings; at most {most.stops} are accepted", param=name)
    if "" in texts:  # every text has it
        raise InvalidField(f"{name} must have no empty string (found {shown(raw)})", param=name)
    if (size := sum(len(text.encode()) for text in texts)) > most.stop_bytes:
        raise InvalidField(f"{name} has {size} bytes; at most {most.stop_bytes} are accepted", param=name)


def _stop_token_ids(fields: Fields, name: str, limits: Limits) -> None:
    if len(memoryview(fields[name])) <= 32 * limits.request.stop_token_ids + 16:  # before it is decoded
        ids = decoded(fields, name, list[int], "a list of token ids")
        if len(ids) <= limits.request.stop_token_ids:
            check_token_ids(name, ids, limits)
            return
    raise InvalidField(f"{name} may have at most {limits.request.stop_token_ids} token ids", param=name)


def _logit_bias(fields: Fields, name: str, limits: Limits) -> None:
    most = limits.request.logit_bias
    if len(memoryview(fields[name])) > 64 * most + 16:  # before it is decoded
        raise InvalidField(f"{name} may have at most {most} token ids", param=name)
    biases = decoded(fields, name, dict[str, float], "an object of token ids and numbers")
    if len(biases) > most:
        raise InvalidField(f"{name} has {len(biases)} token ids; at most {most} are accepted", param=name)
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) < 12 and int(token) < limits.vocabulary):
            raise InvalidField(f"{name}: {token[:40]!r} is no token id in [0, {limits.vocabulary})", param=name)
        if not abs(bias) <= MAX_LOGIT_BIAS:
            raise InvalidField(
                f"{name} values must be from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g} (found {bias:g})", param=name
            )


def _effort(fields: Fields, name: str, _: Limits) -> None:
    expected = f"one of {', '.join(EFFORTS)}, or a number from 0 to {MAX_EFFORT}"
    value = decoded(fields, name, str | float, expected)
    if value not in EFFORTS if isinstance(value, str) else not 0 <= value <= MAX_EFFORT:
        raise InvalidField(f"{name} must be {expected} (found {shown(fields[name])})", param=name)


class _Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | float | None = None
    reasoning_effort: str | float | None = None
    enabled: bool | None = None
    enable: bool | None = None
    exclude: bool | None = None
    max_tokens: int | None = None
    summary: str | None = None


def _reasoning(fields: Fields, name: str, limits: Limits) -> None:
    found = decoded(fields, name, _Reasoning, "an object with effort and enabled")
    for effort in (found.effort, found.reasoning_effort):
        if effort is not None:
            _effort({name: encoded(effort)}, name, limits)


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def includes_usage(fields: Fields, is_streaming: bool) -> bool:
    """Whether the client wants a usage event at the stream's end. Raises InvalidField."""
    if "stream_options" not in fields:
        return False
    options = stream_options(fields, _StreamOptions, 'an object such as {"include_usage": true}', is_streaming)
    return options is not None and bool(options.include_usage)


def stream_options(fields: Fields, kind: Any, expected: str, is_streaming: bool) -> Any:
    """The decoded stream options; None if they are absent. Raises InvalidField."""
    if "stream_options" in fields and not is_streaming:
        raise InvalidField("stream_options needs stream: true; remove it or set stream", param="stream_options")
    return decoded(fields, "stream_options", kind, expected)


def _modalities(fields: Fields, name: str, _: Limits) -> None:
    if decoded(fields, name, list[str], "a list of strings") != ["text"]:
        raise InvalidField(f'{name} must be ["text"] (found {shown(fields[name])})', param=name)


def _tools(fields: Fields, name: str, limits: Limits) -> None:
    check_tools(fields, name, limits, becomes_grammar=must_call(fields))


def _is_checked_elsewhere(_fields: Fields, _name: str, _limits: Limits) -> None:
    """No check here: the endpoint checks the field, because it needs the value."""


_BOOLEAN: Schema = {"type": "boolean"}


TEXT: Schema = {"type": "string"}


def _always(schema: Schema, _: Limits) -> Schema:
    return schema


def _range(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def token_ids(limits: Limits) -> Schema:
    """The schema of a list of token ids."""
    return {"type": "array", "items": _range(0, limits.vocabulary - 1)}


def _tool_schema(limits: Limits) -> Schema:
    function = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "description": {"type": ["string", "null"]},
            "parameters": {"type": ["object", "null"]},
            "strict": {"type": ["boolean", "null"]},
            "defer_loading": {"type": ["boolean", "null"]},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    tool = {
        "type": "object",
        "properties": {"type": {"type": "string"}, "function": function},
        "required": ["function"],
    }
    return {"type": "array", "maxItems": limits.request.tools, "items": tool}


def _response_format_schema(_: Limits) -> Schema:
    """A structural tag has fields of its own."""
    json_schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    properties = {"type": {"enum": [*FORMATS]}, "json_schema": json_schema}
    return {"type": "object", "properties": properties, "required": ["type"]}


def _scalars(limits: Limits) -> Schema:
    names = sorted(TEMPLATE_KWARGS.union(limits.request.template_kwargs))
    scalar = {"type": ["boolean", "number", "string", "null"]}
    return {"type": "object", "properties": dict.fromkeys(names, scalar), "additionalProperties": False}


RULES: Mapping[str, Rule] = {
    **{
        name: Rule(partial(_integer, *each), partial(_always, _range(*each)), f"integer, {each[0]} to {each[1]}")
        for name, each in INTEGERS.items()
    },
    **{
        name: Rule(
            partial(_number, *each),
            partial(
                _always,
                {"type": "number", ("exclusiveMinimum" if each[2] else "minimum"): each[0], "maximum": each[1]},
            ),
            f"number, {'above ' if each[2] else ''}{each[0]:g} to {each[1]:g}",
        )
        for name, each in NUMBERS.items()
    },
    **{name: Rule(_boolean, lambda _: _BOOLEAN, "boolean") for name in BOOLEANS},
    **{
        name: Rule(partial(_text, most), partial(_always, {**TEXT, "maxLength": most}), f"string of {most} bytes")
        for name, most in TEXTS.items()
    },
    **{
        name: Rule(partial(_object, most), lambda _: {"type": "object"}, f"object of {most // 1024} KiB")
        for name, most in OBJECTS.items()
    },
    "top_k": Rule(_top_k, lambda _: _range(*INTEGERS["top_k"]), f"integer, -1 to {INT32_MAX}; -1 and 0: all tokens"),
    "reasoning": Rule(
        _reasoning, lambda _: {"type": "object"}, "object: `effort` as `reasoning_effort`, `enabled`, `exclude`, …"
    ),
    "reasoning_effort": Rule(
        _effort,
        lambda _: {"anyOf": [{"enum": [*EFFORTS]}, {"type": "number", "minimum": 0, "maximum": MAX_EFFORT}]},
        f"{', '.join(EFFORTS)}, or 0 to {MAX_EFFORT}",
    ),
    "stop": Rule(
        _stop,
        lambda limits: {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": limits.request.stops},
            ]
        },
        "string or 32 strings, none of them empty, of 1 KiB together",
    ),
    "stop_token_ids": Rule(
        _stop_token_ids,
        lambda limits: {**token_ids(limits), "maxItems": limits.request.stop_token_ids},
        "128 token ids",
    ),
    "logit_bias": Rule(
        _logit_bias,
        lambda limits: {
            "type": "object",
            "maxProperties": limits.request.logit_bias,
            "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
        },
        "1024 token ids, each -100 to 100; n x prompts x ids: 8192",
    ),
    "response_format": Rule(
        check_response_format,
        _response_format_schema,
        "`text`, `json_object`, `json_schema` or `structural_tag`; schemas of `limits.schema_bytes` (32 KiB)",
    ),
    "json_schema": Rule(
        check_schema_text, lambda _: {"type": "string"}, "JSON schema as a string of `limits.schema_bytes` (32 KiB)"
    ),
    "regex": Rule(
        check_regex_field,
        lambda _: {"type": "string"},
        "1 KiB; groups that repeat must be unambiguous",
    ),
    "ebnf": Rule(check_ebnf, lambda _: {"type": "string"}, "`limits.ebnf_bytes` (0: refused)"),
    "tools": Rule(
        _tools,
        _tool_schema,
        "`limits.tools` (128) functions of `limits.tools_bytes` (128 KiB); parameters that are enforced as a schema",
    ),
    "tool_choice": Rule(
        lambda fields, _name, _limits: must_call(fields),
        lambda _: {"anyOf": [{"enum": ["auto", "required", "none"]}, {"type": "object", "required": ["function"]}]},
        "`auto`, `required`, `none` or a function",
    ),
    "chat_template_kwargs": Rule(
        check_template_kwargs,
        _scalars,
        f"scalars: {', '.join(f'`{name}`' for name in sorted(TEMPLATE_KWARGS))}, and `limits.template_kwargs`",
    ),
    "messages": Rule(
        lambda fields, _, limits: check_messages(fields, limits),
        lambda _: {},
        "`limits.messages` (1024) with 1024 parts of text and 512 calls;"
        " a prompt's size",
    ),
    "input_ids": Rule(check_token_id_field, lambda limits: token_ids(limits), "as many token ids as the context has"),
    "prompt": Rule(
        _is_checked_elsewhere,
        lambda _: {},
        "string, token ids, or a list of either; each of context length x 16 bytes",
    ),
    "suffix": Rule(_is_checked_elsewhere, lambda _: {"type": "string"}, "string, with the prompt of a prompt's size"),
    "model": Rule(_is_checked_elsewhere, lambda _: {}, "string of 1 KiB"),
    "adapter": Rule(_is_checked_elsewhere, lambda _: {}, "string of 1 KiB"),
    "n": Rule(_is_checked_elsewhere, lambda _: {}, "1 to 128, times prompts"),
    "best_of": Rule(_is_checked_elsewhere, lambda _: {}, "`n`"),
    "max_tokens": Rule(_is_checked_elsewhere, lambda _: {}, f"integer, 0 (a chat: 1) to {INT32_MAX}"),
    "logprobs": Rule(
        _is_checked_elsewhere,
        lambda _: {},
        "a chat: boolean; else integer, 0 to 100; with `echo`, a prompt's bytes x (1 + logprobs): "
        "65536; not streamed, n x prompts x max_tokens x (1 + alternatives): "
        "262144",
    ),
    "top_logprobs": Rule(_is_checked_elsewhere, lambda _: {}, "integer, 0 to 100"),
    "stream_options": Rule(
        _is_checked_elsewhere,
        lambda _: {
            "type": "object",
            "properties": {
                name: {"anyOf": [_BOOLEAN, {"type": "null"}]} for name in _StreamOptions.__struct_fields__
            },
            "additionalProperties": False,
        },
        "`include_usage`, `continuous_usage_stats`, `include_obfuscation`; with `stream`",
    ),
    "modalities": Rule(_modalities, lambda _: {"const": ["text"]}, '`["text"]`'),
}  # fmt: skip


def limits_table() -> str:
    """The table in docs/api.md, which a test compares with this one."""
    kinds = {"chat": CHAT_ONLY, "completions": COMPLETIONS_ONLY}
    rows = ["| field | where | what it may be |", "|---|---|---|"]
    by_limits: dict[tuple[str, str], list[str]] = {}
    for name, rule in RULES.items():
        where = next((kind for kind, names in kinds.items() if name in names), "both")
        kept = f"{rule.limits}; no engine gets it" if name in BOOKKEEPING else rule.limits
        by_limits.setdefault((where, kept), []).append(f"`{name}`")
    rows += sorted(f"| {', '.join(sorted(names))} | {where} | {what} |" for (where, what), names in by_limits.items())
    return "\n".join(rows)
