"""Refuses JSON schemas of which the grammar, xgrammar 0.2.7's, would enforce only a part.

xgrammar reads one keyword of a schema and passes over others: the first one of `$ref`, `const`, `enum`, `anyOf` or
`oneOf`, `allOf`, `type`; without any, the schema is one of objects or arrays by their keywords, or of anything. This
module checks each schema in the same way. SGLang refuses some keywords before, wherever they are, so that the schemas
that no other refers to are checked, too. A test gives both random schemas and compares what the grammar accepts with
an independent validator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from router.protocol.regexes import MAX_POSITIONS, RegexRefused, check_regex_of_string

Schema = dict[str, Any]

_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_OBJECTS = ("properties", "additionalProperties")
_ARRAYS = ("items", "prefixItems")
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_LENGTHS = ("minLength", "maxLength")
# That nothing enforces, or only beside few others.
NEVER = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "multipleOf", "uniqueItems", "additionalItems", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_OF_TYPE = {
    "object": (*_OBJECTS, "required"),
    "array": (*_ARRAYS, "minItems", "maxItems"),
    "string": ("pattern", *_LENGTHS),
    "number": (*_LOWER, *_UPPER),
}
_CHOICES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # the first one decides, and the others are passed over
_ASSERTIONS = frozenset({*_CHOICES, "type", *(name for names in _OF_TYPE.values() for name in names)})
# Keywords whose value is a schema, a list of schemas, schemas by name.
_ONE = ("items", "additionalProperties", "contentSchema")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "$defs", "definitions")
FORMATS = frozenset({
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
    "uri-template",
})  # fmt: skip
_COUNTS = (*_LENGTHS, "minItems", "maxItems")
_MOST = 10**18
_INT64 = range(-(2**63), 2**63)
# xgrammar takes schemas for the same that differ in these only, also where they are names of properties or of values.
_ANNOTATIONS = frozenset({
    "title", "default", "description", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema",
})  # fmt: skip


class NotEnforced(ValueError):
    """What is not enforced, and where."""


@dataclass(slots=True)
class GrammarParts:
    """What all schemas of one grammar have together, such as those of a request's tools."""

    keys: dict[str, str] = field(default_factory=dict)  # by which xgrammar knows them
    num_patterns: int = 0
    pattern_bytes: int = 0
    num_positions: int = 0  # of patterns: characters with exact repeats written out
    num_counted: int = 0  # strings with a maximum length, or a minimum over 1
    num_counted_arrays: int = 0  # as strings


def check_enforced(schema: Schema, what: str, parts: GrammarParts) -> None:
    """Makes the schema one that is enforced as a whole, if only annotations have to be left out or added for that.

    `what`: its path in the request. Raises NotEnforced, which names the keyword and its path.
    """
    _Walk(schema, what, parts).check()


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


def _key(schema: Any) -> str:
    """As xgrammar's cache of schemas has it."""

    def without_annotations(value: Schema) -> Schema:
        return {name: each for name, each in value.items() if name not in _ANNOTATIONS}

    return json.dumps(json.loads(json.dumps(schema), object_hook=without_annotations), sort_keys=True)


class _Walk:
    def __init__(self, root: Schema, what: str, parts: GrammarParts) -> None:
        self._root = root
        self._what = what
        self._parts = parts
        self._seen: set[int] = set()
        self._values: dict[int, _Values] = {}  # of schemas that any number of a `oneOf` may refer to

    def check(self) -> None:
        pending: list[tuple[Any, str]] = [(self._root, self._what)]
        visited: list[Schema] = []
        while pending:
            schema, path = pending.pop()
            if schema is True or id(schema) in self._seen:
                continue
            if not isinstance(schema, dict):
                raise NotEnforced(f"{path[:300]}: a schema must be an object that some value matches")
            self._seen.add(id(schema))
            node = _Node(schema, path)
            self._leave_out_annotations(node)
            self._check_keywords(node)
            visited.append(schema)
            if "$ref" in schema:
                self._resolved(schema)  # raises for one that leads to itself
                pending.append((self._target(node), path))
            pending += self._inside(node)
        for schema in reversed(visited):
            self._tell_apart(schema)

    def _inside(self, node: _Node) -> Iterator[tuple[Any, str]]:
        schema = node.schema
        for keyword in _ONE:
            if keyword in schema and schema[keyword] is not False:
                yield schema[keyword], _joined(node.path, keyword)
        for keyword in _LISTS:
            for i, each in enumerate(schema.get(keyword, ())):
                yield each, f"{_joined(node.path, keyword)}[{i}]"
        for keyword in _MAPS:
            for name, each in schema.get(keyword, {}).items():
                yield each, _joined(_joined(node.path, keyword), name)

    def _leave_out_annotations(self, node: _Node) -> None:
        """SGLang refuses formats that xgrammar does not enforce, and other keywords even where they demand nothing."""
        schema = node.schema
        if not isinstance(schema.get("format", ""), str):
            raise node.refuse("format", "must be a string")
        if schema.get("format") not in FORMATS:
            schema.pop("format", None)
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        if schema.get("minLength") == 0:
            del schema["minLength"]

    def _tell_apart(self, schema: Schema) -> None:
        """Adds an anchor to a schema that xgrammar would take for one before."""
        differences: dict[str, Any] = {name: schema[name] for name in ("const", "enum") if name in schema}
        differences |= {f"properties.{name}": _key(each) for name, each in schema.get("properties", {}).items()}
        if differences:
            found = json.dumps(differences)
            keys = self._parts.keys
            if keys.setdefault(_key(schema), found) != found:
                schema["$anchor"] = f"s{len(keys)}"
                keys[_key(schema)] = found

    def _check_keywords(self, node: _Node) -> None:
        schema = node.schema
        for keyword in NEVER:
            if keyword in schema:
                raise node.refuse(keyword, f"{keyword} is not enforced; leave it out, and check the answer yourself")
        if "$id" in schema and schema is not self._root:
            raise node.refuse("$id", "references are resolved from the whole schema's root; leave out $id")
        for keyword in _COUNTS:
            if keyword in schema and type(schema[keyword]) is not int:
                raise node.refuse(keyword, "must be an integer")
        for keyword in _LISTS:
            if not isinstance(schema.get(keyword, []), list):
                raise node.refuse(keyword, "must be a list of schemas")
        for keyword in _MAPS:
            if not isinstance(schema.get(keyword, {}), dict):
                raise node.refuse(keyword, "must be an object of schemas")
        decider = next((each for each in _CHOICES if each in schema), None)
        if decider is None:
            self._check_types(node)
            return
        if schema[decider] == [] and decider != "const":
            raise node.refuse(decider, "must be a list of at least one")
        beside = _ASSERTIONS.intersection(schema) - {decider}
        if decider in ("const", "enum"):
            self._check_values(node, decider, beside)
        elif beside:
            raise node.refuse(
                min(beside), f"is not enforced beside {decider}; put it into the schemas of {decider}, or leave it out"
            )
        elif decider != "$ref":
            self._check_alternatives(node, decider)

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
        if not isinstance(values, list):
            raise node.refuse(keyword, "must be a list of values")
        if any(number not in _INT64 for number in _integers_in(values)):
            raise node.refuse(keyword, "integers of more than 64 bits are not enforced")
        if others := beside - {"type"}:
            raise node.refuse(min(others), f"is not enforced beside {keyword}; leave out one of them")
        if "type" in beside:
            types = {each for each in _types_of(node.schema) if isinstance(each, str)}
            for value in values:
                if types.isdisjoint(_kinds_of(value)):
                    raise node.refuse(keyword, f"{json.dumps(value)[:60]} is not of the type beside it")

    def _check_alternatives(self, node: _Node, keyword: str) -> None:
        each_of = node.schema[keyword]
        if keyword == "allOf" and len(each_of) > 1:
            raise node.refuse("allOf", f"allOf of {len(each_of)} schemas is not enforced; merge them into one")
        if keyword == "oneOf":
            options = [self._values_of(self._resolved(each)) for each in each_of]
            for i, one in enumerate(options):
                if not all(map(one.excludes, options[i + 1 :])):
                    raise node.refuse(
                        "oneOf",
                        "values that match several of its schemas are not ruled out; use anyOf, or schemas that "
                        "differ in type or in the const of a property that all of them require",
                    )

    def _values_of(self, schema: Any) -> _Values:
        if id(schema) not in self._values:
            self._values[id(schema)] = _Values.of(schema)
        return self._values[id(schema)]

    # ---- types --------------------------------------------------------------------------------------------------

    def _check_types(self, node: _Node) -> None:
        schema = node.schema
        if "type" in schema:
            kinds = _types_of(schema)
            if not kinds or any(each not in _TYPES for each in kinds):
                raise node.refuse("type", f"must be one or several of {', '.join(_TYPES)}")
        elif any(each in schema for each in _OBJECTS):
            kinds = ["object", "string"]  # SGLang looks for what a string might be
        elif any(each in schema for each in _ARRAYS):
            kinds = ["array", "string"]
        else:
            kinds = []
            if ignored := _ASSERTIONS.intersection(schema):
                raise node.refuse(min(ignored), "is not enforced without a type beside it; add one")
        if "integer" in kinds:
            self._check_bounds(node, 0, 2**63 - 1)
        if "number" in kinds:
            self._check_bounds(node, 6, 10**9)
        if "string" in kinds:
            self._check_string(node)
        if "array" in kinds:
            self._check_array(node)
        if "object" in kinds:
            self._check_object(node)

    def _check_bounds(self, node: _Node, decimals: int, most: int) -> None:
        """The grammar has numbers of so many decimals within bounds."""
        within: dict[str, int] = {}
        for name in (*_LOWER, *_UPPER):
            if name in node.schema:
                bound = node.schema[name]
                is_number = isinstance(bound, (int, float)) and not isinstance(bound, bool) and abs(bound) < most
                scaled = Decimal(str(bound)).scaleb(decimals) if is_number else Decimal("0.5")
                if scaled != int(scaled):
                    what = f"a number with at most {decimals} decimals" if decimals else "an integer"
                    raise node.refuse(name, f"must be of absolute value below {most}, {what} (found {bound!r:.40})")
                within[name] = int(scaled) + (name == "exclusiveMinimum") - (name == "exclusiveMaximum")
        lower, upper = ([within[name] for name in names if name in within] for names in (_LOWER, _UPPER))
        if lower and upper and max(lower) > min(upper):
            raise node.refuse(next(iter(within)), "no value is within the bounds")

    def _check_string(self, node: _Node) -> None:
        schema = node.schema
        if not isinstance(schema.get("pattern", ""), str):
            raise node.refuse("pattern", "must be a string")
        decider = next((name for name in ("format", "pattern") if name in schema), None)
        for name in ("pattern", *_LENGTHS):
            if decider is not None and name in schema and name != decider:
                raise node.refuse(name, f"is not enforced beside {decider}; leave out one of them")
        if schema.get("minLength", 0) > schema.get("maxLength", _MOST):
            raise node.refuse("minLength", "is over maxLength")
        if decider == "pattern":
            try:
                self._parts.num_positions += check_regex_of_string(schema["pattern"])
            except RegexRefused as refused:
                raise node.refuse("pattern", f"{schema['pattern'][:40]!r} is refused: {refused}") from None
            if self._parts.num_positions > MAX_POSITIONS:
                reason = f"all patterns have more than {MAX_POSITIONS} characters when their repeats are written out"
                raise node.refuse("pattern", f"{reason}; leave some out")

    def _check_array(self, node: _Node) -> None:
        schema = node.schema
        first = schema.get("prefixItems", [])
        if not all(isinstance(each, dict) for each in first):
            raise node.refuse("prefixItems", "must be a list of schemas, which are objects")
        rest = schema.get("items", False)
        if isinstance(rest, list):
            raise node.refuse("items", "must be a schema; those of the first items are prefixItems")
        least, most = schema.get("minItems", 0), schema.get("maxItems", _MOST)
        if not len(first) <= most or not least <= most or (rest is False and least > len(first)):
            reason = "no array has so many items; without items, arrays have those of prefixItems only"
            raise node.refuse("minItems" if "minItems" in schema else "maxItems", reason)

    def _check_object(self, node: _Node) -> None:
        schema = node.schema
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
            raise node.refuse("required", "must be a list of names")
        if unknown := [each for each in required if each not in properties]:
            raise node.refuse(
                "required", f"{unknown[0][:40]!r} is not enforced, since it is not in properties; add it there"
            )
        if schema.get("additionalProperties", False) is not False and properties:
            raise node.refuse(
                "additionalProperties",
                "is not enforced beside properties: these could come again, spelled with escapes, with another value; "
                "leave it out, and answers have the properties only",
            )


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if re.fullmatch(r"[\w$-]+", key) else f"{path}[{json.dumps(key, ensure_ascii=False)}]"
