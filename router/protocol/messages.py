"""Checks the parts of a chat's prompt: messages and their content, tools, variables of the chat template."""

from typing import Any

import msgspec

from router.errors import InvalidField
from router.protocol.enforced_schemas import GrammarParts
from router.protocol.field_values import Kind, Limits, decode_field, decoded, encoded, items_of, shown, without_nulls
from router.protocol.grammars import ToolParts, check_schema, decoded_schema
from router.protocol.request_body import Fields, nesting

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Few templates know these two, OpenAI's later name of the first and its earlier one of the second.
ROLE_FOR_TEMPLATES = {"developer": "system", "function": "tool"}
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


class _Part(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    type: str
    text: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    name: str | None = None  # of a tool_reference
    cache_control: _Object | None = None  # Anthropic's, which clients of several services send


class _Called(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    arguments: str | _Object | None = None
    parsed_arguments: Any = None  # of openai's parse(), as `parsed` of a message; engines do not read it


class _ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    function: _Called
    id: str | None = None
    index: int | None = None
    type: str = "function"


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Any = None
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tools: None = None  # messages bring none
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


class _Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    strict: bool | None = None
    defer_loading: bool | None = None


class _Tool(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    function: _Function
    type: str = "function"
    defer_loading: bool | None = None
    cache_control: _Object | None = None


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    function: _Named
    type: str = "function"


_message = msgspec.json.Decoder(Message)


def check_messages(fields: Fields, limits: Limits) -> None:
    """Check `messages`, a list of at least one, and put them into the form that templates know. Raises InvalidField."""
    most, raw_messages = limits.request, fields["messages"]
    limits.check_prompt_size("messages", len(memoryview(raw_messages)))
    messages = items_of(raw_messages, "messages", most.messages, "messages", "a list of messages")
    if not messages:
        raise InvalidField("messages must be a list of at least one message", param="messages")
    num_parts = num_calls = 0
    is_rewritten = False
    for i, raw in enumerate(messages):
        try:
            message = _message.decode(raw)
        except msgspec.ValidationError:
            message, messages[i] = _message_without_nulls(raw, f"messages[{i}]")
            raw, is_rewritten = messages[i], True
        role = message.role
        if not (isinstance(role, str) and role.lower() in ROLES):
            found = "none" if role is None else repr(role)[:60]
            raise InvalidField(
                f"messages[{i}].role must be one of {', '.join(ROLES)} (found {found})", param=f"messages[{i}].role"
            )
        if isinstance(message.content, list):
            num_parts += len(message.content)
            for j, part in enumerate(message.content):
                _check_part(part, role.lower(), f"messages[{i}].content[{j}]")
        elif message.content is None and role.lower() == "user":
            where = f"messages[{i}].content"
            raise InvalidField(f"{where} is required: a string or a list of parts (found none)", param=where)
        if message.tool_calls:
            num_calls += len(message.tool_calls)
            _check_calls(message.tool_calls, f"messages[{i}]", limits)
        if changes := changes_for_templates(message):
            messages[i] = encoded({**msgspec.json.decode(raw, type=Fields), **changes})
            is_rewritten = True
    if num_parts > most.content_parts or num_calls > most.tool_calls:
        raise InvalidField(
            f"messages have {num_parts} parts and {num_calls} tool calls; at most {most.content_parts} and "
            f"{most.tool_calls} are accepted",
            param="messages",
        )
    if is_rewritten:
        fields["messages"] = encoded(messages)


def _message_without_nulls(raw: msgspec.Raw, where: str) -> tuple[Message, msgspec.Raw]:
    """A message that may have nulls in fields that it does not know. Raises InvalidField."""
    if memoryview(raw)[:1] != b"{":
        raise InvalidField(f"{where} must be an object (found {shown(raw)})", param="messages")
    try:
        raw = without_nulls(raw, Message)
        return _message.decode(raw), raw
    except msgspec.MsgspecError as error:
        _check_kinds_of_parts(raw, where)  # says more than that a part has a field `image_url`
        raise InvalidField(f"{where}: {readable(error)}", param="messages") from None


class _KindsOfParts(msgspec.Struct):
    content: list[Kind] = []


def _check_kinds_of_parts(raw: msgspec.Raw, where: str) -> None:
    try:
        kinds = msgspec.json.decode(raw, type=_KindsOfParts).content
    except msgspec.MsgspecError:
        return
    for j, part in enumerate(kinds):
        if part.type not in PARTS:
            raise _unknown_kind(part.type, f"{where}.content[{j}]")


def _unknown_kind(kind: Any, where: str) -> InvalidField:
    found = "none" if kind is None else repr(kind)[:60]
    return InvalidField(
        f"{where}.type must be one of {', '.join(PARTS)}: the model takes text (found {found})", param="messages"
    )


def _check_part(part: _Part, role: str, where: str) -> None:
    """Raises InvalidField for a part that engines would refuse without saying which, or why."""
    if part.type not in PARTS:
        raise _unknown_kind(part.type, where)
    if part.type in ("thinking", "reasoning"):
        if role != "assistant":
            raise InvalidField(f"{where}: parts of type {part.type} belong to assistants' messages", param="messages")
        if (part.thinking is None) == (part.text is None):
            raise InvalidField(f"{where} needs either thinking or text: a string", param="messages")
        return
    needed = {"refusal": "refusal", "tool_reference": "name"}.get(part.type, "text")
    if getattr(part, needed) is None:
        raise InvalidField(f"{where}.{needed} is required: a string", param="messages")


def _check_calls(calls: list[_ToolCall], where: str, limits: Limits) -> None:
    """Raises InvalidField for what templates cannot read, or not write: Python does so recursively."""
    most = limits.request.nesting
    for i, call in enumerate(calls):
        if call.type != "function":
            raise InvalidField(
                f"{where}.tool_calls[{i}].type must be function (found {call.type[:40]!r})", param="messages"
            )
        if isinstance(arguments := call.function.arguments, str):
            check_arguments(arguments, f"{where}.tool_calls[{i}].function.arguments", "messages", most)


def check_arguments(arguments: str, where: str, param: str, max_nesting: int) -> None:
    """A past call's arguments: a JSON object, or nothing. Raises InvalidField."""
    if nesting(arguments.encode(), max_nesting) > max_nesting:
        raise InvalidField(f"{where} are nested deeper than {max_nesting} levels", param=param)
    try:
        _arguments.decode(arguments or "{}")
    except msgspec.MsgspecError:
        raise InvalidField(
            f"{where} must be a JSON object as a string (found {arguments[:40]!r}); leave out calls that are "
            "incomplete",
            param=param,
        ) from None


_arguments = msgspec.json.Decoder(dict[str, msgspec.Raw])


def changes_for_templates(message: Message) -> dict[str, Any]:
    """The fields that templates, or engines before them, would not understand, as they do understand them."""
    changes: dict[str, Any] = {}
    role = message.role.lower()  # of users, engines know the lower case alone
    if (role := ROLE_FOR_TEMPLATES.get(role, role)) != message.role:
        changes["role"] = role
    if isinstance(message.content, list) and any(part.type == "refusal" for part in message.content):
        parts = [{"type": "text", "text": part.refusal} if part.type == "refusal" else part for part in message.content]
        changes["content"] = parts
    if message.tool_calls and not all(call.function.arguments for call in message.tool_calls):
        changes["tool_calls"] = [_with_arguments(call) for call in message.tool_calls]
    return changes


def _with_arguments(call: _ToolCall) -> dict[str, Any]:
    """A function without parameters is often called without arguments."""
    function = {"name": call.function.name, "arguments": call.function.arguments or "{}"}
    return {name: getattr(call, name) for name in ("id", "index", "type")} | {"function": function}


def check_size_of_tools(raw: msgspec.Raw, name: str, limits: Limits) -> None:
    """Check the size of tools before they are decoded. Raises InvalidField."""
    size, most = len(memoryview(raw)), limits.request.tools_bytes
    if size > most:
        raise InvalidField(f"{name} have {size} bytes; at most {most} are accepted", param=name)


def check_tools(fields: Fields, name: str, limits: Limits) -> None:
    """Engines compile the parameters of tools that must be called, else of strict ones. Raises InvalidField."""
    if name not in fields:
        return
    most = limits.request
    check_size_of_tools(fields[name], name, limits)
    try:
        tools = decode_field(fields, name, list[_Tool])
    except msgspec.MsgspecError as error:
        raise InvalidField(
            f"{name} must be a list of {{type: function, function: {{name, parameters, …}}}}: {readable(error)}",
            param=name,
        ) from None
    if len(tools) > most.tools:
        raise InvalidField(f"{len(tools)} tools; at most {most.tools} are accepted", param=name)
    schema_bytes, checked, parts, required = 0, ToolParts(), GrammarParts(), required_call(fields)
    for i, tool in enumerate(tools):
        function = tool.function
        if not function.name or len(function.name) > MAX_NAME_BYTES:
            raise InvalidField(f"{name}[{i}].function.name must have 1 to {MAX_NAME_BYTES} characters", param=name)
        if function.parameters is msgspec.UNSET:
            continue
        raw, what = function.parameters, f"{name}[{i}].function.parameters"
        if memoryview(raw)[:1] != b"{" and bytes(raw) != b"null":
            raise InvalidField(f"{what} must be a JSON schema, an object (found {shown(raw)})", param=name)
        schema = decoded_schema(raw, what) or {}
        checked.add(schema, what)
        if function.strict if required is None else required in ("", function.name):
            schema_bytes += len(memoryview(raw))
            if schema_bytes > most.schema_bytes:
                raise InvalidField(
                    f"{name}: the parameters of tools that are strict or must be called have {schema_bytes} bytes; at "
                    f"most {most.schema_bytes} are accepted",
                    param=name,
                )
            check_schema(schema, what, limits, parts)
            if schema != (msgspec.json.decode(raw) or {}):
                function.parameters = encoded(schema)
                fields[name] = encoded(tools)


def required_call(fields: Fields) -> str | None:
    """The tool that `tool_choice` demands a call of, empty for any of them; None: of none. Raises InvalidField."""
    name = "tool_choice"
    if name not in fields:
        return None
    expected = f"one of {', '.join(CHOICES)}, or {{type: function, function: {{name}}}}"
    if memoryview(fields[name])[:1] == b'"':
        choice = decoded(fields, name, str, expected)
        if choice not in CHOICES:
            raise InvalidField(f"{name} must be {expected} (found {choice[:40]!r})", param=name)
        return "" if choice == "required" else None
    choice = decoded(fields, name, _ToolChoice, expected)
    if choice.type != "function" or not 0 < len(choice.function.name) <= MAX_NAME_BYTES:
        raise InvalidField(f"{name} must be {expected}", param=name)
    return choice.function.name


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


def readable(error: msgspec.MsgspecError) -> str:
    """As "content[0].text: Expected `str`, got `int`"."""
    what, _, where = str(error).partition(" - at `$")
    path = where.rstrip("`").removeprefix(".")
    return f"{path}: {what[:160]}" if path else what[:160]
