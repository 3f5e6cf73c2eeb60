"""Refuses JSON schemas of which the grammar, xgrammar 0.2.1's, would enforce only a part.

xgrammar reads one keyword of a schema and passes over others: the first one of `$ref`, `const`, `enum`, `anyOf` or
`oneOf`, `allOf`, `type`; without any, the schema is one of objects or arrays by their keywords, or of anything. This
module walks a schema in the same way. A test gives both random schemas and compares what the grammar accepts with an
independent validator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from router.protocol.regexes import RegexRefused, check_regex_of_string
from router.protocol.schemas.integer_ranges import is_enforced_range
from router.protocol.schemas.values import integers_in, is_of, kinds_of, map_in, names_in, types_of, values_of

Schema = dict[str, Any]
Found = TypeVar("Found")

_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_OBJECTS = ("properties", "additionalProperties", "unevaluatedProperties")
_ARRAYS = ("items", "prefixItems", "unevaluatedItems")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LENGTHS = ("minLength", "maxLength")
_SCHEMA_MAPS = ("properties", "patternProperties")
# That nothing enforces, whatever is beside them.
NEVER = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "multipleOf", "additionalItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_OF_TYPE = {
    "object": (*_OBJECTS, "patternProperties", "propertyNames", "required", "minProperties", "maxProperties"),
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
_COUNTS = (*_LENGTHS, "minItems", "maxItems", "minProperties", "maxProperties")
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


class _Walk:
    def __init__(self, root: Schema, what: str) -> None:
        self._root = root
        self._what = what
        self._seen: set[int] = set()
        self._known: dict[tuple[Any, ...], tuple[Any, Any]] = {}

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

    def _once(self, of: Callable[..., Found], *schemas: Any) -> Found:
        """`of(*schemas)`, found once: a thousand references may lead to one enum of a thousand values."""
        key = (of.__name__, *map(id, schemas))
        if key not in self._known:
            self._known[key] = schemas, of(*schemas)  # with the schemas: an id is unique while its object lives
        found: Found = self._known[key][1]
        return found

    def _inside(self, node: _Node) -> Iterator[tuple[Any, str]]:
        """The schemas that the grammar makes a part of this one of."""
        schema = node.schema
        for keyword in NEVER:
            if keyword in schema and not (
                keyword == "multipleOf" and schema[keyword] == 1 and types_of(schema) == ["integer"]
            ):
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
        if beside - {"type"} or ("type" in beside and not self._has_types(schema, schema["type"])):
            other = min(beside - {"type"} or beside)
            raise node.refuse(
                other, f"is not enforced beside {decider}; put it into the schemas of {decider}, or leave it out"
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
        return self._once(self._followed, schema)

    def _followed(self, schema: Any) -> Any:
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
        if any(number not in _INT64 for number in integers_in(values)):
            raise node.refuse(keyword, "integers of more than 64 bits are not enforced")
        if others := beside - {"type"}:
            raise node.refuse(min(others), f"is not enforced beside {keyword}; leave out one of them")
        if "type" in beside:
            types = [each for each in _TYPES if each in types_of(node.schema)]  # each once
            for value in values:
                if not any(is_of(value, each) for each in types):
                    raise node.refuse(keyword, f"{json.dumps(value)[:60]} is not of the type beside it")

    def _of_alternatives(self, node: _Node, keyword: str) -> Iterator[tuple[Any, str]]:
        each_of = node.schema[keyword]
        if keyword == "allOf" and len(each_of) > 1:
            raise node.refuse("allOf", f"allOf of {len(each_of)} schemas is not enforced; merge them into one")
        if keyword == "oneOf":
            options = [self._resolved(each) for each in each_of]
            for i, one in enumerate(options):
                for other in options[i + 1 :]:
                    if not self._once(self._exclude_each_other, one, other):
                        raise node.refuse(
                            "oneOf",
                            "values that match several of its schemas are not ruled out; use anyOf, or schemas that "
                            "differ in type or in the const of a property that all of them require",
                        )
        return ((each, f"{_joined(node.path, keyword)}[{i}]") for i, each in enumerate(each_of))

    def _has_types(self, schema: Schema, types: Any) -> bool:
        """Whether all that a `$ref`, `anyOf`, `oneOf` or `allOf` leads to is of these types."""
        wanted = types if isinstance(types, list) else [types]
        pending, rounds = [{name: each for name, each in schema.items() if name != "type"}], 0
        while pending:
            one = self._resolved(pending.pop())
            rounds += 1
            options = one.get("anyOf", one.get("oneOf")) if isinstance(one, dict) else None
            if rounds > 100 or not isinstance(one, dict):
                return False
            if isinstance(options, list):
                pending += options
            elif not (kinds := self._once(kinds_of, one)) or not all(
                each in wanted or (each == "integer" and "number" in wanted) for each in kinds
            ):
                return False
        return True

    def _exclude_each_other(self, one: Any, other: Any) -> bool:
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        kinds, others = self._once(kinds_of, one), self._once(kinds_of, other)
        if not kinds or not others:
            return False
        values, other_values = self._once(values_of, one), self._once(values_of, other)
        if values is not None and other_values is not None:
            return values.isdisjoint(other_values)
        both = {each if each != "integer" else "number" for each in kinds}
        both &= {each if each != "integer" else "number" for each in others}
        if not both:
            return True
        if both != {"object"}:
            return False
        for name in set(names_in(one, "required")) & set(names_in(other, "required")):
            mine, theirs = (
                self._once(values_of, self._resolved(map_in(each, "properties").get(name))) for each in (one, other)
            )
            if mine is not None and theirs is not None and mine.isdisjoint(theirs):
                return True
        return False

    # ---- types --------------------------------------------------------------------------------------------------

    def _of_types(self, node: _Node) -> Iterator[tuple[Any, str]]:
        schema = node.schema
        if "type" in schema:
            kinds = types_of(schema)
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
            self._check_pattern(node, "pattern", schema["pattern"])

    def _check_pattern(self, node: _Node, keyword: str, pattern: str) -> None:
        try:
            check_regex_of_string(pattern)
        except RegexRefused as refused:
            raise node.refuse(keyword, f"{pattern[:40]!r} is refused: {refused}") from None

    def _of_array(self, node: _Node) -> Iterator[tuple[Any, str]]:
        schema = node.schema
        first = schema.get("prefixItems", [])
        if not isinstance(first, list) or not all(isinstance(each, dict) for each in first):
            raise node.refuse("prefixItems", "must be a list of schemas, which are objects")
        rest_name = "items" if "items" in schema else "unevaluatedItems"
        rest = schema.get(rest_name, False)
        if isinstance(rest, list):
            raise node.refuse("items", "must be a schema; those of the first items are prefixItems")
        least, most = schema.get("minItems", 0), schema.get("maxItems", _MOST)
        if not len(first) <= most or not least <= most or (rest is False and least > len(first)):
            reason = "no array has so many items; without items, arrays have those of prefixItems only"
            raise node.refuse("minItems" if "minItems" in schema else "maxItems", reason)
        for i, each in enumerate(first):
            yield each, f"{_joined(node.path, 'prefixItems')}[{i}]"
        if rest is not False:
            yield rest, _joined(node.path, rest_name)

    def _of_object(self, node: _Node) -> Iterator[tuple[Any, str]]:
        schema = node.schema
        for name in _SCHEMA_MAPS:
            if not isinstance(schema.get(name, {}), dict):
                raise node.refuse(name, "must be an object of schemas")
        properties, patterns = map_in(schema, "properties"), map_in(schema, "patternProperties")
        required = schema.get("required", [])
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
        extra_name = next((name for name in _OBJECTS[1:] if name in schema), "")
        extra = schema.get(extra_name, False)
        if extra is not False and properties:
            raise node.refuse(
                extra_name,
                "is not enforced beside properties: these could come again with another value; leave it out, and "
                "answers have the properties only",
            )
        if patterns and (properties or len(patterns) > 1):
            raise node.refuse("patternProperties", "is not enforced with several patterns, or beside properties")
        if "propertyNames" in schema:
            self._check_names(
                node,
                bool(properties or patterns) or extra not in (True, False) or (extra is False and bool(extra_name)),
            )
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", _MOST)
        is_open = extra is not False or patterns or "propertyNames" in schema
        if least > (1 if is_open else len(properties)):
            raise node.refuse(
                "minProperties", "is not enforced where names may repeat, or no object has so many properties"
            )
        if most < len(required) or least > most:
            raise node.refuse("maxProperties", "no object has so few properties")
        for keyword, schemas in (("properties", properties), ("patternProperties", patterns)):
            for name, each in schemas.items():
                if keyword == "patternProperties":
                    self._check_pattern(node, keyword, name)
                yield each, _joined(_joined(node.path, keyword), name)
        if extra not in (True, False) and not patterns:
            yield extra, _joined(node.path, extra_name)

    def _check_names(self, node: _Node, is_ignored: bool) -> None:
        names = node.schema["propertyNames"]
        if is_ignored:
            raise node.refuse("propertyNames", "is not enforced beside other keywords about properties")
        if not isinstance(names, dict) or names.get("type", "string") != "string":
            raise node.refuse("propertyNames", "must be a schema of strings")
        inner = _Node({**names, "type": "string"}, _joined(node.path, "propertyNames"))
        if any(keyword in names for keyword in ("$ref", "anyOf", "oneOf", "allOf")):
            raise node.refuse("propertyNames", "is enforced with enum, const, pattern, format and lengths only")
        for _ in self._inside(inner):
            pass


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if re.fullmatch(r"[\w$-]+", key) else f"{path}[{json.dumps(key, ensure_ascii=False)}]"
