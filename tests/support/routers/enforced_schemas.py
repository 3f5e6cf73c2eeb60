"""Schemas that the router admits, since grammars enforce them."""

import json
from typing import Any

Schema = dict[str, Any]


def of_object(properties: Schema, **others: Any) -> Schema:
    return {"type": "object", "properties": properties, **others}


INTEGER, STRING, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
A_AND_B = of_object({"a": INTEGER, "b": INTEGER})

# Each with an answer that it forbids, and one that it permits.
ENFORCED: tuple[tuple[Schema, str, str], ...] = (
    (of_object({"a": INTEGER}, required=["a"]), "{}", '{"a": 1}'),
    (of_object({"a": INTEGER}, additionalProperties=False), '{"b": 1}', "{}"),
    (of_object({"a": INTEGER}), '{"b": 1}', '{"a": 1}'),  # no others, though the schema permits them
    (of_object({"a": {"$ref": "#/$defs/x"}}, **{"$defs": {"x": {"type": "boolean"}}}), '{"a": 1}', '{"a": true}'),
    (of_object({"c": {"$ref": "#"}}), '{"c": 1}', '{"c": {}}'),
    (of_object({"c": {"allOf": [{"$ref": "#/$defs/x"}], "default": 1}}, **{"$defs": {"x": INTEGER}}), '{"c": ""}',
     '{"c": 2}'),
    (of_object({"é": INTEGER, "": NULL}, required=["é", ""]), "{}", '{"é": 1, "": null}'),
    ({"type": "object", "additionalProperties": INTEGER}, '{"a": "x"}', '{"a": 1}'),
    (of_object({'a"\\\n': INTEGER}, additionalProperties=False), '{"b": 1}', '{"a\\"\\\\\\n": 1}'),
    ({"type": "array", "items": INTEGER}, '["a"]', "[1, 2]"),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}, "[1, 2, 3]", "[1, 2]"),
    ({"type": "array", "prefixItems": [INTEGER, STRING], "items": False}, '["a", 1]', '[1, "a"]'),
    ({"type": "array", "prefixItems": [INTEGER], "items": STRING}, "[1, 2]", '[1, "a"]'),
    ({"type": "string", "minLength": 2, "maxLength": 3}, '"a"', '"abc"'),
    ({"type": "string", "pattern": "^a+$"}, '"b"', '"aa"'),
    ({"type": "string", "pattern": r"^.+@\S+$|^[^a]\s$"}, '"a"b@c"', '"a b@c"'),
    ({"type": "string", "pattern": "^[a-z]{1,128}$"}, f'"{"a" * 129}"', '"a"'),
    ({"type": "string", "format": "date"}, "1", '"2020-12-31"'),
    ({"type": "string", "format": "price", "maxLength": 1}, '"ab"', '"a"'),  # an unknown format is a note
    ({"type": "integer", "minimum": 0}, "-1", "7"),
    ({"type": "integer", "exclusiveMinimum": 0}, "0", "1"),
    ({"type": "integer", "minimum": 10, "maximum": 2**62}, str(2**62 + 1), str(2**62)),
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 150, "maximum": 200}, "150", "149"),
    ({"type": "number", "minimum": 0}, "-1", "1.5"),
    ({"type": "number", "exclusiveMinimum": -0.5, "maximum": 150.25}, "-0.5", "150.25"),
    ({"type": ["number", "null"], "minimum": 5}, "4.9", "5.0"),
    ({"type": ["string", "null"], "maxLength": 1}, '"aa"', "null"),
    ({"enum": [2**53 + 1, "a", 1.5, {"a": [None]}]}, str(2**53), str(2**53 + 1)),
    ({"type": "string", "enum": ["a", "b"]}, '"c"', '"b"'),
    ({"const": 'a"\\\n'}, '"a"', json.dumps('a"\\\n')),
    ({"anyOf": [INTEGER, {"type": "null"}], "title": "A", "default": None}, '"a"', "null"),
    ({"oneOf": [STRING, INTEGER]}, "null", "1"),
    ({"oneOf": [of_object({"k": {"const": "a"}}, required=["k"]), of_object({"k": {"const": "b"}}, required=["k"])]},
     '{"k": "c"}', '{"k": "b"}'),
)  # fmt: skip
