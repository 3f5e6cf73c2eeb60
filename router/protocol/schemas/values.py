"""What the values that match a schema are, as far as it says so itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]


def types_of(schema: Schema) -> list[Any]:
    found = schema.get("type", [])
    return found if isinstance(found, list) else [found]


def kinds_of(schema: Schema) -> list[Any]:
    """The types of what matches a schema without alternatives, each once; none if they are unknown."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return [*dict.fromkeys(map(_kind_of, values))]
    if "type" in schema:
        return [*dict.fromkeys(each for each in types_of(schema) if isinstance(each, str))]
    return ["object"] if "properties" in schema else []


def _kind_of(value: Any) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return kinds.get(type(value), "null")


def is_of(value: Any, kind: Any) -> bool:
    found = _kind_of(value)
    return (
        found == kind
        or (found == "integer" and kind == "number")
        or (kind == "integer" and found == "number" and value.is_integer())
    )


def values_of(schema: Any) -> set[str] | None:
    """The values of an enum or const, None if it is neither."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {
        json.dumps(int(each) if isinstance(each, float) and each.is_integer() else each, sort_keys=True)
        for each in values
    }


def integers_in(values: list[Any]) -> Iterator[int]:
    pending = [*values]
    while pending:
        value = pending.pop()
        if isinstance(value, int):
            yield value
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()


def names_in(schema: Schema, name: str) -> list[Any]:
    found = schema.get(name)
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def map_in(schema: Schema, name: str) -> dict[str, Any]:
    found = schema.get(name)
    return found if isinstance(found, dict) else {}
