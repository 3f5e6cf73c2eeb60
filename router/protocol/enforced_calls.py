"""Makes engines enforce the parameters of tools that are strict, and of all that may answer a call that is required."""

from typing import Any

import msgspec

from router.errors import InvalidField
from router.protocol.messages import required_call
from router.protocol.request_body import Fields

_Parts = dict[str, msgspec.Raw]
_TRUE = msgspec.Raw(b"true")
_NO_PARAMETERS = msgspec.Raw(b'{"type":"object","properties":{}}')


def enforce_calls(fields: Fields) -> Fields:
    """The fields of a valid chat as engines enforce them. Raises InvalidField for what they could not enforce.

    SGLang enforces the parameters of strict tools only, and where one is named it takes a call of any of them. A
    response format would take the place of the calls' grammar; it is meant for answers that are no call.
    """
    required = required_call(fields)
    if required is not None:
        if "regex" in fields:
            raise InvalidField("regex and tool_choice exclude each other: remove one", param="regex")
        fields = {name: value for name, value in fields.items() if name != "response_format"}
    tools = msgspec.json.decode(fields["tools"], type=list[_Parts]) if "tools" in fields else []
    functions = [msgspec.json.decode(tool["function"], type=_Parts) for tool in tools]
    if required is not None:
        called = _called(required, [msgspec.json.decode(function["name"]) for function in functions])
    else:
        called = [i for i, function in enumerate(functions) if function.get("strict") == _TRUE]
    if not called:
        return fields
    definitions: dict[str, Any] = {}
    for i in called:
        functions[i] |= {"strict": _TRUE, "parameters": _parameters(functions[i], i, definitions)}
    kept = called if required is not None else range(len(tools))
    own = [{**tools[i], "function": functions[i]} for i in kept]
    return {**fields, "tools": msgspec.Raw(msgspec.json.encode(own))}


def _called(required: str, names: list[str]) -> list[int]:
    """Which tools may answer a call that is required."""
    if not required:
        if not names:
            raise InvalidField("tool_choice is required, but there are no tools", param="tool_choice")
        return list(range(len(names)))
    if required not in names:
        raise InvalidField(
            f"tool_choice names {required!r}, which is not among the tools ({', '.join(names)[:200]})",
            param="tool_choice",
        )
    return [names.index(required)]


def _parameters(function: _Parts, index: int, definitions: dict[str, Any]) -> msgspec.Raw:
    """A schema of objects. `definitions` are those of the tools before, which engines keep by their names alone."""
    raw = function.get("parameters")
    schema = msgspec.json.decode(raw) if raw is not None else None
    if raw is None or not schema:
        return _NO_PARAMETERS
    where = f"tools[{index}].function.parameters"
    if not _is_of_objects(schema):
        raise InvalidField(
            f'{where} must have "type": "object", since arguments are an object (found {str(schema)[:60]})',
            param="tools",
        )
    own = schema.get("$defs")
    for name, definition in own.items() if isinstance(own, dict) else ():
        if definitions.setdefault(name, definition) != definition:
            raise InvalidField(
                f"{where}: $defs {name[:60]!r} differs from that of another tool; rename one", param="tools"
            )
    return raw


def _is_of_objects(schema: dict[str, Any]) -> bool:
    reference = schema.get("$ref")
    if isinstance(reference, str):  # as pydantic writes a model that contains itself
        group, _, name = reference.removeprefix("#/").partition("/")
        group_of = schema.get(group)
        found = group_of.get(name) if isinstance(group_of, dict) else None
        return isinstance(found, dict) and found.get("type") == "object"
    return schema.get("type", "object" if "properties" in schema else None) == "object"
