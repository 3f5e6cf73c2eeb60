"""Bounds what output must match: JSON schemas and regular expressions.

Engines compile grammars beside the scheduler and match them inside its loop, against every token of the vocabulary. The
limits cover what was measured to be expensive: optional properties, counted repeats, ambiguous expressions.
"""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from router.errors import InvalidField
from router.protocol.enforced_schemas import GrammarParts, NotEnforced, check_enforced
from router.protocol.field_values import Limits, decoded, encoded, shown
from router.protocol.regexes import RegexRefused, check_regex
from router.protocol.request_body import MAX_NESTING, Fields, nesting

MAX_SCHEMAS = 1000  # objects inside a schema that are schemas or lists of them
MAX_PROPERTIES = 400
MAX_OPTIONAL = 64  # properties of one object that are not required: the matcher tries every subset's next one
MAX_ALTERNATIVES = 64  # of one anyOf, oneOf or allOf
MAX_ENUM = 1000
# In the parameters of all tools, see `ToolParts`. Objects, lists and booleans take 0.1 ms each, some lists are checked
# item against item, and Python compiles patterns: a range of characters beyond ASCII takes it 1 to 3 ms.
MAX_CHECKED = 8192  # of which pydantic writes four for an optional field
MAX_PATTERN_BYTES = 32 * 1024
_WIDE_COST = 32
_WIDE = re.compile(r"[^\x00-\x7f]|\\[uUN]")
# With a maximum, or a minimum over 1, in all schemas of a grammar.
MAX_COUNTED = 16  # strings; each takes seconds to compile
MAX_COUNTED_ARRAYS = 64  # 300 of them take 170 MB, or xgrammar fails
# Of items. Every token's mask takes longer with each item up to the minimum: 90 ms at 1,000.
MAX_MINIMUM = 256
MAX_PATTERNS = 16
MAX_DEPTH = 32

_COUNTS = {
    "minLength": 1_000_000, "maxLength": 1_000_000, "maxItems": 1_000_000, "minItems": MAX_MINIMUM,
}  # fmt: skip
FORMATS = ("text", "json_object", "json_schema")


class _JsonSchema(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    schema: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    json_schema: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def check_response_format(fields: Fields, name: str, limits: Limits) -> None:
    """Raises InvalidField."""
    wanted = f'an object with a type of {", ".join(FORMATS)}, the last with "json_schema": {{"name": …, "schema": …}}'
    found = decoded(fields, name, _ResponseFormat, wanted)
    if found is None:
        return
    if found.type not in FORMATS:
        raise InvalidField(f"{name}.type must be one of {', '.join(FORMATS)} (found {found.type[:40]!r})", param=name)
    if found.json_schema is not msgspec.UNSET and bytes(found.json_schema) != b"null":
        part = decoded({name: found.json_schema}, name, _JsonSchema, 'an object {"name": …, "schema": …}')
        if part.schema is not msgspec.UNSET:
            schema = _enforced(part.schema, f"{name}.json_schema.schema", limits)
            if schema is not part.schema:
                part.schema = schema
                fields[name] = encoded({"type": found.type, "json_schema": part})
            return
    if found.type == "json_schema":
        raise InvalidField(f"{name}.json_schema.schema is required: a JSON schema", param=name)


def check_regex_field(fields: Fields, name: str, limits: Limits) -> None:
    """Raises InvalidField."""
    pattern = decoded(fields, name, str, "a string")
    if not pattern:
        return
    _check_bytes_of_patterns(len(pattern.encode()), name, name, limits)
    try:
        check_regex(pattern)
    except RegexRefused as refused:
        raise InvalidField(f"{name} {pattern[:40]!r} is refused: {refused}", param=name) from None


def _enforced(raw: msgspec.Raw, what: str, limits: Limits) -> msgspec.Raw:
    """The schema as it is enforced."""
    param, size, most = what.partition(".")[0], len(memoryview(raw)), limits.request.schema_bytes
    if size > most:
        raise InvalidField(f"{what} has {size} bytes; at most {most} are accepted", param=param)
    schema = decoded_schema(raw, what) if nesting(bytes(raw)) <= MAX_NESTING else None
    if not isinstance(schema, dict):
        raise InvalidField(f"{what} must be a JSON schema, an object (found {shown(raw)})", param=param)
    check_schema(schema, what, limits, GrammarParts())
    return raw if schema == msgspec.json.decode(raw) else encoded(schema)


def decoded_schema(raw: msgspec.Raw, what: str) -> Any:
    """A value that may be a JSON schema. Raises InvalidField for a number beyond float64, as 1e999."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        param = what.partition(".")[0].partition("[")[0]
        raise InvalidField(f"{what} cannot be read: {error}", param=param) from None


def check_schema(schema: dict[str, Any], what: str, limits: Limits, parts: GrammarParts) -> None:
    """A decoded JSON schema that output must match. Changes annotations as `check_enforced`. Raises InvalidField.

    `parts`: of the schemas of the same grammar that were checked before; this one's are added.
    """
    param = what.partition(".")[0].partition("[")[0]

    def refuse(reason: str) -> InvalidField:
        return InvalidField(f"{what} {reason}", param=param)

    num_schemas = num_properties = 0
    pending: list[tuple[Any, int]] = [(schema, 0)]
    while pending:
        node, depth = pending.pop()
        if isinstance(node, list):
            pending += ((each, depth + 1) for each in node if isinstance(each, (dict, list)))
        else:
            properties, required = node.get("properties"), node.get("required")
            if properties is not None:
                if not isinstance(properties, dict):
                    raise refuse("has properties that are no object")
                num_properties += len(properties)
                names = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
                if len(properties.keys() - names) > MAX_OPTIONAL:
                    raise refuse(f"has an object with more than {MAX_OPTIONAL} properties that are not required")
            for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
                if isinstance(node.get(key), list) and len(node[key]) > MAX_ALTERNATIVES:
                    raise refuse(f"has {len(node[key])} schemas in {key}; at most {MAX_ALTERNATIVES} are accepted")
            if isinstance(node.get("enum"), list) and len(node["enum"]) > MAX_ENUM:
                raise refuse(f"has {len(node['enum'])} values in an enum; at most {MAX_ENUM} are accepted")
            for key, most in _COUNTS.items():
                count = node.get(key)
                if isinstance(count, (int, float)) and not 0 <= count <= most:
                    raise refuse(f"has {key} {count}; 0 to {most} is accepted")
            parts.num_counted += _is_counted(node.get("minLength"), node.get("maxLength"))
            parts.num_counted_arrays += _is_counted(node.get("minItems"), node.get("maxItems"))
            if isinstance(pattern := node.get("pattern"), str):
                parts.num_patterns += 1
                parts.pattern_bytes += len(pattern.encode())
                if parts.num_patterns > MAX_PATTERNS:
                    raise refuse(f"has more than {MAX_PATTERNS} patterns")
                _check_bytes_of_patterns(parts.pattern_bytes, f"{what}: a pattern", param, limits)
            pending += ((each, depth + 1) for each in node.values() if isinstance(each, (dict, list)))
        num_schemas += 1
        if depth > MAX_DEPTH:
            raise refuse(f"is nested deeper than {MAX_DEPTH} levels")
        if parts.num_counted_arrays > MAX_COUNTED_ARRAYS:
            raise refuse(
                f"is too large: at most {MAX_COUNTED_ARRAYS} arrays with a maximum of items, or a minimum over 1, are "
                "accepted"
            )
        if num_schemas > MAX_SCHEMAS or num_properties > MAX_PROPERTIES or parts.num_counted > MAX_COUNTED:
            raise refuse(
                f"is too large: at most {MAX_PROPERTIES} properties, {MAX_COUNTED} strings with a maximum length, "
                f"or a minimum over 1, and {MAX_SCHEMAS} objects and lists are accepted"
            )
    try:
        check_enforced(schema, what, parts)
    except NotEnforced as error:
        raise InvalidField(str(error), param=param) from None


@dataclass(slots=True)
class ToolParts:
    """What engines check, in their event loop, of the parameters of a request's tools: that these are schemas."""

    num_checked: int = 0
    pattern_bytes: int = 0

    def add(self, parameters: Any, what: str) -> None:
        """Count those of a tool. Raises InvalidField if they are too many, or one is too large."""
        pending = [parameters]
        while pending:
            node = pending.pop()
            self.num_checked += isinstance(node, (dict, list, bool))
            if isinstance(node, dict):
                pending += node.values()
                self._add_patterns(node.get("pattern"), node.get("patternProperties"))
            elif isinstance(node, list):
                pending += node
                if len(node) > MAX_ENUM:
                    raise InvalidField(
                        f"{what} has a list of {len(node)} items; at most {MAX_ENUM} are accepted", param="tools"
                    )
        if self.num_checked > MAX_CHECKED:
            raise InvalidField(
                f"tools: their parameters have over {MAX_CHECKED} objects, lists and booleans; leave some tools out",
                param="tools",
            )
        if self.pattern_bytes > MAX_PATTERN_BYTES:
            raise InvalidField(
                f"tools: the patterns of their parameters have over {MAX_PATTERN_BYTES} bytes, those of patterns with "
                f"characters beyond ASCII counted {_WIDE_COST} times; leave some out",
                param="tools",
            )

    def _add_patterns(self, pattern: Any, by_pattern: Any) -> None:
        for each in [pattern, *(by_pattern if isinstance(by_pattern, dict) else ())]:
            if isinstance(each, str):
                self.pattern_bytes += len(each.encode()) * (_WIDE_COST if _WIDE.search(each) else 1)


def _is_counted(least: Any, most: Any) -> bool:
    return isinstance(most, (int, float)) or (isinstance(least, (int, float)) and least > 1)


def _check_bytes_of_patterns(num_bytes: int, what: str, param: str, limits: Limits) -> None:
    most = limits.request.regex_bytes
    if num_bytes > most:
        raise InvalidField(f"{what} has over {most} bytes, which is the most that is accepted", param=param)
