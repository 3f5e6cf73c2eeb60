"""Refuses JSON schemas of which the grammar, xgrammar 0.2.1's, would enforce only a part.

xgrammar reads one keyword of a schema and passes over others: the first one of `$ref`, `const`, `enum`, `anyOf` or
`oneOf`, `allOf`, `type`; without any, the schema is one of objects or arrays by their keywords, or of anything. This
module walks a schema in the same way. A test gives both random schemas and compares what the grammar accepts with an
independent validator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from router.protocol.integer_ranges import is_enforced_range
from router.protocol.regexes import RegexRefused, check_regex_of_string

Schema = dict[str, Any]

_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_OBJECTS = ("properties", "additionalProperties")
_ARRAYS = ("items", "prefixItems")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LENGTHS = ("minLength", "maxLength")
# That nothing enforces, or only beside few others.
NEVER = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "multipleOf", "additionalItems", "$dynamicRef", "$recursiveRef", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
_OF_TYPE = {
    "object": (*_OBJECTS, "required"),
    "array": (*_ARRAYS, "uniqueItems", "minItems", "maxItems"),
    "string": ("pattern", *_LENGTHS),
    "integer": _BOUNDS,
    "number": _BOUNDS,
}
_CHOICES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # the first one decides, and the others are passed over
_ASSERTIONS = frozenset({*_CHOICES, "type", *(name for names in _OF_TYPE.values() for name in names)})
FORMATS = frozenset({
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
})  # fmt: skip
_COUNTS = (*_LENGTHS, "minItems", "maxItems")
_MOST = 10**18  # of bounds: the grammar computes with powers of ten in 64 bits
_INT64 = range(-(2**63), 2**63)
_KEY_CHARACTERS = re.compile(r'["\\\x00-\x1f\x7f]')


class NotEnforced(ValueError):
    """What is not enforced, and where."""


def check_enforced(schema: Schema, what: str) -> None:
    """`what`: the path of the schema in the request. Raises NotEnforced, which names the keyword and its path."""
    _Walk(schema, what).check()


@dataclass(slots=True)
class _Node:
    schema: Schema
    path: str

    def refuse(self, keyword: str, reason: str) -> NotEnforced:
        return NotEnforced(f"{_joined(self.path, keyword)[:300]}: {reason}")


@dataclass(frozen=True, slots=True)
class _Values:
    """What a schema of a `oneOf` says of the values that match it."""

    kinds: frozenset[str]  # with "number" for integers; none if they are unknown
    listed: frozenset[str] | None  # as JSON, of an enum or const
    required: dict[str, frozenset[str]]  # the listed values of properties that are required

    @classmethod
    def of(cls, schema: Any) -> _Values:
        if not isinstance(schema, dict):
            return cls(frozenset(), None, {})
        values = _listed(schema)
        if values is not None:
            kinds = {_kinds_of(value)[-1] for value in values}
        else:
            kinds = {"number" if each == "integer" else each for each in _types_of(schema) if isinstance(each, str)}
        properties, required = schema.get("properties"), schema.get("required")
        tags: dict[str, frozenset[str]] = {}
        if isinstance(properties, dict) and isinstance(required, list):
            for name, each in properties.items():
                if name in required and (found := _listed(each)) is not None:
                    tags[name] = _as_json(found)
        return cls(frozenset(kinds), None if values is None else _as_json(values), tags)

    def excludes(self, other: _Values) -> bool:
        """Whether no value matches both."""
        if not self.kinds or not other.kinds:
            return False
        if self.listed is not None and other.listed is not None:
            return self.listed.isdisjoint(other.listed)
        both = self.kinds & other.kinds
        tags = self.required.keys() & other.required.keys()
        return not both or (
            both == {"object"} and any(self.required[name].isdisjoint(other.required[name]) for name in tags)
        )


def _types_of(schema: Schema) -> list[Any]:
    found = schema.get("type", [])
    return found if isinstance(found, list) else [found]


def _kinds_of(value: Any) -> tuple[str, ...]:
    """The types that a value is of, "number" the last of those of numbers."""
    if isinstance(value, float) and value.is_integer():
        return "integer", "number"
    kinds = {dict: ("object",), list: ("array",), str: ("string",), bool: ("boolean",), float: ("number",)}
    return kinds.get(type(value), ("integer", "number") if value is not None else ("null",))


def _listed(schema: Any) -> list[Any] | None:
    """The values of an enum or const, None if it is neither."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _as_json(values: list[Any]) -> frozenset[str]:
    return frozenset(
        json.dumps(int(each) if isinstance(each, float) and each.is_integer() else each, sort_keys=True)
        for each in values
    )


def _integers_in(values: list[Any]) -> Iterator[int]:
    pending = [*values]
    while pending:
        value = pending.pop()
        if isinstance(value, int):
            yield value
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()


class _Walk:
    def __init__(self, root: Schema, what: str) -> None:
        self._root = root
        self._what = what
        self._seen: set[int] = set()

    def check(self) -> None:
        pending: list[tuple[Any, str]] = [(self._root, self._what)]
        while pending:
            schema, path = pending.pop()
            if schema is True or id(schema) in self._seen:
                continue
            if not isinstance(schema, dict):
                raise NotEnforced(f"{path[:300]}: a schema must be an object that some value matches")
            self._seen.add(id(schema))
            pending += self._inside(_Node(schema, path))

    def _inside(self, node: _Node) -> Iterator[tuple[Any, str]]:
        """The schemas that the grammar makes a part of this one of."""
        schema = node.schema
        for keyword in NEVER:
            if keyword in schema:
                raise node.refuse(keyword, f"{keyword} is not enforced; leave it out, and check the answer yourself")
        if schema.get("uniqueItems"):
            raise node.refuse("uniqueItems", "uniqueItems is not enforced; leave it out, and check the answer yourself")
        if "$id" in schema and schema is not self._root:
            raise node.refuse("$id", "references are resolved from the whole schema's root; leave out $id")
        for keyword in _COUNTS:
            if keyword in schema and type(schema[keyword]) is not int:
                raise node.refuse(keyword, "must be an integer")
        decider = next((each for each in _CHOICES if each in schema), None)
        if decider is None:
            return self._of_types(node)
        if decider in ("anyOf", "oneOf", "allOf") and not (isinstance(schema[decider], list) and schema[decider]):
            raise node.refuse(decider, "must be a list of at least one schema")
        beside = _ASSERTIONS.intersection(schema) - {decider}
        if decider in ("const", "enum"):
            self._check_values(node, decider, beside)
            return iter(())
        if beside:
            raise node.refuse(
                min(beside), f"is not enforced beside {decider}; put it into the schemas of {decider}, or leave it out"
            )
        if decider == "$ref":
            self._resolved(schema)  # raises for one that leads to itself
            return iter([(self._target(node), node.path)])
        return self._of_alternatives(node, decider)

    # ---- keywords that decide -----------------------------------------------------------------------------------

    def _target(self, node: _Node) -> Any:
        reference, target = node.schema["$ref"], self._root
        if reference == "#":
            return target
        if not isinstance(reference, str) or not re.fullmatch(r"#(/[^/~%]+)+", reference):
            raise node.refuse("$ref", f"only references such as #/$defs/name are enforced (found {reference!r:.60})")
        for part in reference[2:].split("/"):
            if not isinstance(target, dict) or part not in target:
                raise node.refuse("$ref", f"{reference!r:.60} is not in the schema")
            target = target[part]
        return target

    def _resolved(self, schema: Any) -> Any:
        """The schema that a reference, or an `allOf` of one, leads to."""
        for _ in range(32):
            if isinstance(schema, dict) and "$ref" in schema:
                schema = self._target(_Node(schema, self._what))
            elif isinstance(schema, dict) and isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
                schema = schema["allOf"][0]
            else:
                return schema
        raise NotEnforced(f"{self._what}: a $ref leads to itself")

    def _check_values(self, node: _Node, keyword: str, beside: frozenset[str]) -> None:
        values = node.schema[keyword] if keyword == "enum" else [node.schema[keyword]]
        if not isinstance(values, list) or not values:
            raise node.refuse(keyword, "must be a list of at least one value")
        if any(number not in _INT64 for number in _integers_in(values)):
            raise node.refuse(keyword, "integers of more than 64 bits are not enforced")
        if others := beside - {"type"}:
            raise node.refuse(min(others), f"is not enforced beside {keyword}; leave out one of them")
        if "type" in beside:
            types = {each for each in _types_of(node.schema) if isinstance(each, str)}
            for value in values:
                if types.isdisjoint(_kinds_of(value)):
                    raise node.refuse(keyword, f"{json.dumps(value)[:60]} is not of the type beside it")

    def _of_alternatives(self, node: _Node, keyword: str) -> Iterator[tuple[Any, str]]:
        each_of = node.schema[keyword]
        if keyword == "allOf" and len(each_of) > 1:
            raise node.refuse("allOf", f"allOf of {len(each_of)} schemas is not enforced; merge them into one")
        if keyword == "oneOf":
            options = [_Values.of(self._resolved(each)) for each in each_of]
            for i, one in enumerate(options):
                if not all(map(one.excludes, options[i + 1 :])):
                    raise node.refuse(
                        "oneOf",
                        "values that match several of its schemas are not ruled out; use anyOf, or schemas that "
                        "differ in type or in the const of a property that all of them require",
                    )
        return ((each, f"{_joined(node.path, keyword)}[{i}]") for i, each in enumerate(each_of))

    # ---- types --------------------------------------------------------------------------------------------------

    def _of_types(self, node: _Node) -> Iterator[tuple[Any, str]]:
        schema = node.schema
        if "type" in schema:
            kinds = _types_of(schema)
            if not kinds or any(each not in _TYPES for each in kinds):
                raise node.refuse("type", f"must be one or several of {', '.join(_TYPES)}")
        elif any(each in schema for each in _OBJECTS):
            kinds = ["object"]
        elif any(each in schema for each in _ARRAYS):
            kinds = ["array"]
        else:
            kinds = []
            if ignored := _ASSERTIONS.intersection(schema):
                raise node.refuse(min(ignored), "is not enforced without a type beside it; add one")
        if "integer" in kinds:
            self._check_integer(node)
        if "number" in kinds:
            self._check_number(node)
        if "string" in kinds:
            self._check_string(node)
        inside: list[tuple[Any, str]] = []
        if "array" in kinds:
            inside += self._of_array(node)
        if "object" in kinds:
            inside += self._of_object(node)
        return iter(inside)

    def _check_integer(self, node: _Node) -> None:
        found = {name: node.schema[name] for name in _BOUNDS if name in node.schema}
        for name, bound in found.items():
            is_whole = isinstance(bound, (int, float)) and not isinstance(bound, bool) and bound == int(bound)
            if not is_whole or abs(bound) >= _MOST:
                raise node.refuse(name, f"must be an integer below 10^18 (found {bound!r:.40})")
        for inclusive, exclusive in (_BOUNDS[0::2], _BOUNDS[1::2]):
            if inclusive in found and exclusive in found:
                raise node.refuse(exclusive, f"is not enforced beside {inclusive}; leave out one of them")
        low, high = found.get("minimum"), found.get("maximum")
        if "exclusiveMinimum" in found:
            low = found["exclusiveMinimum"] + 1
        if "exclusiveMaximum" in found:
            high = found["exclusiveMaximum"] - 1
        if low is not None and high is not None and low > high:
            raise node.refuse(next(iter(found)), "no integer is within the bounds")
        if not is_enforced_range(None if low is None else int(low), None if high is None else int(high)):
            raise node.refuse(
                next(iter(found)),
                f"the grammar does not enforce the range from {'any' if low is None else int(low)} to "
                f"{'any' if high is None else int(high)} exactly; choose other bounds, such as powers of ten, list the "
                "values in an enum, or leave the bounds out",
            )

    def _check_number(self, node: _Node) -> None:
        found = [name for name in _BOUNDS if name in node.schema]
        if found and not (found == ["minimum"] and node.schema["minimum"] == 0):
            name = next(name for name in found if name != "minimum" or node.schema[name] != 0)
            raise node.refuse(
                name, "bounds of numbers are not enforced, except a minimum of 0; use integers, or leave it out"
            )

    def _check_string(self, node: _Node) -> None:
        schema = node.schema
        for name in ("format", "pattern"):
            if name in schema and not isinstance(schema[name], str):
                raise node.refuse(name, "must be a string")
        decider = "format" if schema.get("format") in FORMATS else "pattern" if "pattern" in schema else None
        for name in ("pattern", *_LENGTHS):
            if decider is not None and name in schema and name != decider and (name, schema[name]) != ("minLength", 0):
                raise node.refuse(name, f"is not enforced beside {decider}; leave out one of them")
        if schema.get("minLength", 0) > schema.get("maxLength", _MOST):
            raise node.refuse("minLength", "is over maxLength")
        if decider == "pattern":
            pattern = schema["pattern"]
            try:
                check_regex_of_string(pattern)
            except RegexRefused as refused:
                raise node.refuse("pattern", f"{pattern[:40]!r} is refused: {refused}") from None

    def _of_array(self, node: _Node) -> Iterator[tuple[Any, str]]:
        schema = node.schema
        first = schema.get("prefixItems", [])
        if not isinstance(first, list) or not all(isinstance(each, dict) for each in first):
            raise node.refuse("prefixItems", "must be a list of schemas, which are objects")
        rest = schema.get("items", False)
        if isinstance(rest, list):
            raise node.refuse("items", "must be a schema; those of the first items are prefixItems")
        least, most = schema.get("minItems", 0), schema.get("maxItems", _MOST)
        if not len(first) <= most or not least <= most or (rest is False and least > len(first)):
            reason = "no array has so many items; without items, arrays have those of prefixItems only"
            raise node.refuse("minItems" if "minItems" in schema else "maxItems", reason)
        for i, each in enumerate(first):
            yield each, f"{_joined(node.path, 'prefixItems')}[{i}]"
        if rest is not False:
            yield rest, _joined(node.path, "items")

    def _of_object(self, node: _Node) -> Iterator[tuple[Any, str]]:
        schema = node.schema
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise node.refuse("properties", "must be an object of schemas")
        if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
            raise node.refuse("required", "must be a list of names")
        for name in properties:
            if _KEY_CHARACTERS.search(name):
                raise node.refuse(
                    "properties", f"the name {name[:40]!r} has a quote, a backslash or a control character"
                )
        if unknown := [each for each in required if each not in properties]:
            raise node.refuse(
                "required", f"{unknown[0][:40]!r} is not enforced, since it is not in properties; add it there"
            )
        extra = schema.get("additionalProperties", False)
        if extra is not False and properties:
            raise node.refuse(
                "additionalProperties",
                "is not enforced beside properties: these could come again with another value; leave it out, and "
                "answers have the properties only",
            )
        for name, each in properties.items():
            yield each, _joined(_joined(node.path, "properties"), name)
        if extra not in (True, False):
            yield extra, _joined(node.path, "additionalProperties")


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if re.fullmatch(r"[\w$-]+", key) else f"{path}[{json.dumps(key, ensure_ascii=False)}]"
