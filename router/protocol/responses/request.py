"""Translates a request of /v1/responses to the fields of a chat, whose rules then check them."""

from typing import Any

import msgspec

from router.errors import InvalidField
from router.protocol.field_values import (
    Kind,
    Limits,
    boolean,
    decoded,
    decoded_item,
    encoded,
    integer,
    items_of,
    shown,
    type_of,
)
from router.protocol.messages import check_size_of_tools
from router.protocol.request_body import Fields
from router.protocol.responses.fields import BOOKKEEPING, FIXED, NAME_OF, SAME_AS_CHAT
from router.protocol.responses.input_items import messages_of
from router.protocol.rules import INT32_MAX, RULES, stream_options

FORMATS = ("text", "json_object", "json_schema")
VERBOSITIES = ("low", "medium", "high")
_EFFORT = "an object such as {effort: low}"


class _FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    type: str = "function"
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    strict: bool | None = None


class _NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str


class _Format(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    schema: msgspec.Raw = msgspec.Raw(b"null")
    description: str | None = None
    strict: bool | None = None


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    format: msgspec.Raw = msgspec.Raw(b"null")
    verbosity: str | None = None


class _ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


_function_tool = msgspec.json.Decoder(_FunctionTool)


def as_chat(fields: Fields, limits: Limits) -> tuple[Fields, dict[str, Any]]:
    """The request as a chat, without `model` and `adapter`, and the fields that the response repeats.

    Raises InvalidField.
    """
    for name, (value, remedy) in FIXED.items():
        expected = msgspec.json.encode(value)  # JSON tells 0 and 0.0 from false
        if name in fields and msgspec.json.encode(decoded(fields, name, Any, "")) != expected:
            raise InvalidField(
                f"{name} must be {expected.decode()} (found {shown(fields[name])}): {remedy}", param=name
            )
    for name in BOOKKEEPING:
        if name in fields:
            RULES[name](fields, name, limits)
    metadata = decoded(fields, "metadata", dict[str, str], "an object of strings") or {}
    limit = integer(fields, "max_output_tokens", 1, INT32_MAX)
    # Copies: a part of the body would keep all of it in memory, beside the messages that are made of it.
    chat: Fields = {name: fields[name].copy() for name in SAME_AS_CHAT if name in fields}
    chat["messages"] = messages_of(fields, limits)
    if limit is not None:
        chat["max_completion_tokens"] = fields["max_output_tokens"].copy()
    tools = _tools(fields, limits)
    if tools:
        chat["tools"] = encoded([_chat_tool(tool) for tool in tools])
    if "tool_choice" in fields:
        chat["tool_choice"] = _tool_choice(fields)
    text_format, verbosity = _text(fields)
    if text_format.type != "text":
        chat["response_format"] = _response_format(text_format)
    effort = _effort(fields)
    if effort is not None:
        chat["reasoning_effort"] = encoded(effort)
    is_streaming = boolean(fields, "stream")
    stream_options(fields, _StreamOptions, "an object with include_obfuscation, and nothing else", is_streaming)
    shown_format: dict[str, Any] = {"type": text_format.type}
    if text_format.type == "json_schema":
        shown_format |= {
            "name": text_format.name,
            "description": text_format.description,
            "schema": encoded(text_format.schema),
            "strict": bool(text_format.strict),
        }
    repeated = {
        "background": False,
        "instructions": _repeated(fields, "instructions"),
        "max_output_tokens": limit,
        "max_tool_calls": None,
        "metadata": metadata,
        "parallel_tool_calls": decoded(fields, "parallel_tool_calls", bool, "true or false") is not False,
        "previous_response_id": None,
        "prompt_cache_key": _repeated(fields, "prompt_cache_key"),
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": _repeated(fields, "safety_identifier"),
        "store": False,
        "temperature": _repeated(fields, "temperature"),
        "text": encoded({"format": shown_format, "verbosity": verbosity}),
        "tool_choice": _repeated(fields, "tool_choice") if "tool_choice" in fields else "auto",
        "tools": encoded([_shown_tool(tool) for tool in tools]),
        "top_p": _repeated(fields, "top_p"),
        "truncation": "disabled",
        "user": _repeated(fields, "user"),
    }
    return chat, repeated


def named_as_here(error: InvalidField) -> InvalidField:
    """An error of the chat's rules, with the field's name replaced by that in /v1/responses."""
    message, param = str(error), error.param or ""
    for name, here in NAME_OF.items():
        message = message.replace(name, here)
        if param.startswith(name):
            param = here
            break
    return InvalidField(message.replace("].function.", "]."), param=param or None)


def _tools(fields: Fields, limits: Limits) -> list[_FunctionTool]:
    if "tools" not in fields:
        return []
    check_size_of_tools(fields["tools"], "tools", limits)
    expected = "a list of {type: function, name, parameters, …}"
    items = items_of(fields["tools"], "tools", limits.request.tools, "tools", expected)
    return [_tool(item, i, expected) for i, item in enumerate(items)]


def _tool(raw: msgspec.Raw, index: int, expected: str) -> _FunctionTool:
    try:
        kind = type_of(raw)
        if kind == "function":
            return decoded_item(_function_tool, raw)
    except msgspec.MsgspecError as error:
        raise InvalidField(f"tools must be {expected}: tools[{index}]: {str(error)[:160]}", param="tools") from None
    raise InvalidField(
        f"tools[{index}].type {repr(kind)[:60]} is not offered: describe the tool as a function, and run it yourself",
        param="tools",
    )


def _chat_tool(tool: _FunctionTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    if bytes(tool.parameters) != b"null":
        function["parameters"] = tool.parameters
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _shown_tool(tool: _FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }


def _tool_choice(fields: Fields) -> msgspec.Raw:
    raw = fields["tool_choice"]
    if memoryview(raw)[:1] != b"{":
        return raw.copy()
    expected = "auto, required, none, or {type: function, name}"
    kind = decoded(fields, "tool_choice", Kind, expected).type
    if kind != "function":
        raise InvalidField(
            f"tool_choice.type {repr(kind)[:60]} is not offered: name a function, or send only the tools that may be "
            "called",
            param="tool_choice",
        )
    named = decoded(fields, "tool_choice", _NamedTool, expected)
    return encoded({"type": "function", "function": {"name": named.name}})


def _text(fields: Fields) -> tuple[_Format, str]:
    expected = "an object such as {format: {type: text}}"
    text = decoded(fields, "text", _Text, expected) or _Text()
    verbosity = text.verbosity or "medium"
    if verbosity not in VERBOSITIES:
        raise InvalidField(
            f"text.verbosity must be one of {', '.join(VERBOSITIES)} (found {verbosity[:40]!r})", param="text"
        )
    if bytes(text.format) == b"null":
        return _Format("text"), verbosity
    found = decoded({"text.format": text.format}, "text.format", _Format, f"an object of type {', '.join(FORMATS)}")
    if found.type not in FORMATS:
        raise InvalidField(
            f"text.format.type must be one of {', '.join(FORMATS)} (found {found.type[:40]!r})", param="text.format"
        )
    if found.type == "json_schema" and (not found.name or bytes(found.schema) == b"null"):
        raise InvalidField("text.format of type json_schema needs a name and a schema", param="text.format")
    if found.type != "json_schema" and (found.name is not None or bytes(found.schema) != b"null"):
        raise InvalidField(f"text.format of type {found.type} has no name and no schema", param="text.format")
    return found, verbosity


def _response_format(found: _Format) -> msgspec.Raw:
    if found.type == "json_object":
        return encoded({"type": found.type})
    given = {"name": found.name, "schema": found.schema, "description": found.description, "strict": found.strict}
    schema = {name: value for name, value in given.items() if value is not None}
    return encoded({"type": found.type, "json_schema": schema})


def _effort(fields: Fields) -> str | None:
    options = decoded(fields, "reasoning", _ReasoningOptions, _EFFORT) or _ReasoningOptions()
    for name in ("summary", "generate_summary"):
        if getattr(options, name) is not None:
            raise InvalidField(
                f"reasoning.{name} is not offered: an answer has the model's reasoning itself; remove it",
                param=f"reasoning.{name}",
            )
    return options.effort


def _repeated(fields: Fields, name: str) -> msgspec.Raw | None:
    return fields[name].copy() if name in fields else None
