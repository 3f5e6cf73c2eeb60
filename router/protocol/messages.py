"""Checks the parts of a chat's prompt: messages and their content, tools, variables of the chat template."""

from __future__ import annotations

from typing import Any

import msgspec

from router.errors import InvalidField
from router.protocol.field_values import Limits, bounded_list, decoded, shown
from router.protocol.grammars import check_schema
from router.protocol.request_body import Fields, nesting

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PARTS = ("text", "thinking", "reasoning", "refusal", "tool_reference")
CHOICES = ("auto", "required", "none")
# Variables that chat templates read. Everything else may be an argument of the function that renders them, of which
# `chat_template` is a program.
TEMPLATE_KWARGS = frozenset({
    "enable_thinking", "thinking", "thinking_budget", "thinking_mode", "reasoning_effort", "preserve_thinking",
    "clear_thinking", "truncate_history_thinking", "low_effort", "date_string", "tools_in_user_message",
    "spaces_between_special_tokens",
})  # fmt: skip
MAX_TEMPLATE_TEXT = 64
MAX_TEMPLATE_BYTES = 4096
MAX_NAME_BYTES = 256  # of a tool, a participant, a tool call

_Object = dict[str, Any]


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    name: str | None = None
    cache_control: _Object | None = None  # Anthropic's, which clients of several services send


class _Called(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    arguments: str | _Object | None = None


class _ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    function: _Called
    id: str | None = None
    index: int | None = None
    type: str = "function"


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Any = None
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tools: msgspec.Raw | None = None
    reasoning_content: str | None = None
    # what answers have and clients send back; engines do not read it
    refusal: str | None = None
    reasoning: Any = None
    annotations: list[Any] | None = None
    audio: _Object | None = None
    function_call: _Object | None = None
    thinking_blocks: list[Any] | None = None
    provider_specific_fields: _Object | None = None
    parsed: Any = None


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    strict: bool | None = None
    defer_loading: bool | None = None


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    function: _Function
    type: str = "function"
    defer_loading: bool | None = None
    cache_control: _Object | None = None


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    function: _Named
    type: str = "function"


_message = msgspec.json.Decoder(_Message)


def check_messages(fields: Fields, limits: Limits) -> None:
    """Raises InvalidField if `messages` is not a list of at least one message with a known role and known content."""
    most, raw_messages = limits.request, fields["messages"]
    limits.check_prompt_size("messages", len(memoryview(raw_messages)))
    try:
        messages = bounded_list(raw_messages, most.messages)
    except msgspec.MsgspecError:
        raise InvalidField(
            f"messages must be a list of messages (found {shown(raw_messages)})", param="messages"
        ) from None
    if messages is None:
        raise InvalidField(
            f"there are more than {most.messages} messages, which are the most that are accepted", param="messages"
        )
    if not messages:
        raise InvalidField("messages must be a list of at least one message", param="messages")
    num_parts = num_calls = tools_bytes = 0
    for i, raw in enumerate(messages):
        try:
            message = _message.decode(raw)
        except msgspec.MsgspecError as error:
            if memoryview(raw)[:1] != b"{":
                raise InvalidField(f"messages[{i}] must be an object (found {shown(raw)})", param="messages") from None
            raise InvalidField(f"messages[{i}]: {_readable(error)}", param="messages") from None
        role = message.role
        if not (isinstance(role, str) and role.lower() in ROLES):
            found = "none" if role is None else repr(role)[:60]
            raise InvalidField(
                f"messages[{i}].role must be one of {', '.join(ROLES)} (found {found})", param=f"messages[{i}].role"
            )
        if isinstance(message.content, list):
            num_parts += len(message.content)
            for j, part in enumerate(message.content):
                if part.type not in PARTS:
                    raise InvalidField(
                        f"messages[{i}].content[{j}].type must be one of {', '.join(PARTS)}: the model takes text "
                        f"(found {part.type[:40]!r})",
                        param="messages",
                    )
        if message.tool_calls:
            num_calls += len(message.tool_calls)
            _check_arguments(message.tool_calls, f"messages[{i}]", limits)
        if message.tools is not None:
            tools_bytes += len(memoryview(message.tools))
            check_tools({"messages": message.tools}, "messages", limits, becomes_grammar=False)
    if num_parts > most.content_parts or num_calls > most.tool_calls or tools_bytes > most.tools_bytes:
        raise InvalidField(
            f"messages have {num_parts} parts, {num_calls} tool calls and {tools_bytes} bytes of tools; at most "
            f"{most.content_parts}, {most.tool_calls} and {most.tools_bytes} are accepted",
            param="messages",
        )


def _check_arguments(calls: list[_ToolCall], where: str, limits: Limits) -> None:
    """Raises InvalidField for JSON, in a string, that templates cannot write: Python does so recursively."""
    most = limits.request.nesting
    for i, call in enumerate(calls):
        arguments = call.function.arguments
        if isinstance(arguments, str) and nesting(arguments.encode(), most) > most:
            raise InvalidField(
                f"{where}.tool_calls[{i}].function.arguments are nested deeper than {most} levels", param="messages"
            )


def check_size_of_tools(raw: msgspec.Raw, name: str, limits: Limits, where: str = "tools") -> None:
    """Check the size of tools before they are decoded. Raises InvalidField."""
    size, most = len(memoryview(raw)), limits.request.tools_bytes
    if size > most:
        raise InvalidField(f"{where} have {size} bytes; at most {most} are accepted", param=name)


def check_tools(fields: Fields, name: str, limits: Limits, *, becomes_grammar: bool) -> None:
    """`becomes_grammar`: the answer must be a call, so engines compile the parameters' schemas. Raises InvalidField."""
    if name not in fields:
        return
    most, where = limits.request, name if name == "tools" else f"{name}: tools"
    check_size_of_tools(fields[name], name, limits, where)
    try:
        tools = msgspec.json.decode(fields[name], type=list[_Tool])
    except msgspec.MsgspecError as error:
        raise InvalidField(
            f"{where} must be a list of {{type: function, function: {{name, parameters, …}}}}: {_readable(error)}",
            param=name,
        ) from None
    if len(tools) > most.tools:
        raise InvalidField(f"{len(tools)} tools; at most {most.tools} are accepted", param=name)
    schema_bytes = 0
    for i, tool in enumerate(tools):
        function = tool.function
        if not function.name or len(function.name) > MAX_NAME_BYTES:
            raise InvalidField(f"{where}[{i}].function.name must have 1 to {MAX_NAME_BYTES} characters", param=name)
        if function.parameters is msgspec.UNSET:
            continue
        raw = function.parameters
        if memoryview(raw)[:1] != b"{" and bytes(raw) != b"null":
            raise InvalidField(
                f"{where}[{i}].function.parameters must be a JSON schema, an object (found {shown(raw)})", param=name
            )
        if becomes_grammar or function.strict:
            schema_bytes += len(memoryview(raw))
            if schema_bytes > most.schema_bytes:
                raise InvalidField(
                    f"{where}: the parameters of tools that are strict or must be called have {schema_bytes} bytes; at "
                    f"most {most.schema_bytes} are accepted",
                    param=name,
                )
            check_schema(msgspec.json.decode(raw) or {}, f"{name}[{i}].function.parameters", limits)


def must_call(fields: Fields) -> bool:
    """Whether `tool_choice` asks for a call. Raises InvalidField if it has another form."""
    name = "tool_choice"
    if name not in fields:
        return False
    expected = f"one of {', '.join(CHOICES)}, or {{type: function, function: {{name}}}}"
    if memoryview(fields[name])[:1] == b'"':
        choice = decoded(fields, name, str, expected)
        if choice not in CHOICES:
            raise InvalidField(f"{name} must be {expected} (found {choice[:40]!r})", param=name)
        return choice == "required"
    choice = decoded(fields, name, _ToolChoice, expected)
    if choice.type != "function" or not 0 < len(choice.function.name) <= MAX_NAME_BYTES:
        raise InvalidField(f"{name} must be {expected}", param=name)
    return True


def check_template_kwargs(fields: Fields, name: str, limits: Limits) -> None:
    """Variables of the template by name, each a scalar. Raises InvalidField."""
    if len(memoryview(fields[name])) > MAX_TEMPLATE_BYTES:
        raise InvalidField(f"{name} has over {MAX_TEMPLATE_BYTES} bytes", param=name)
    variables = decoded(fields, name, dict[str, bool | int | float | str | None], "an object of scalars")
    for variable, value in (variables or {}).items():
        if variable not in TEMPLATE_KWARGS and variable not in limits.request.template_kwargs:
            known = ", ".join(sorted(TEMPLATE_KWARGS.union(limits.request.template_kwargs)))
            raise InvalidField(f"{name}.{variable[:60]} is not accepted; the names are {known}", param=name)
        if isinstance(value, str) and len(value) > MAX_TEMPLATE_TEXT:
            raise InvalidField(f"{name}.{variable} has over {MAX_TEMPLATE_TEXT} characters", param=name)


def _readable(error: msgspec.MsgspecError) -> str:
    """As "content[0].text: Expected `str`, got `int`"."""
    what, _, where = str(error).partition(" - at `$")
    path = where.rstrip("`").removeprefix(".")
    return f"{path}: {what[:160]}" if path else what[:160]
