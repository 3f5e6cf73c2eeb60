"""What the router lets through, the grammar enforces: xgrammar of the pin, judged by the jsonschema package."""

from __future__ import annotations

import datetime
import enum
import json
import re
import uuid
from pathlib import Path
from random import Random
from typing import Any, Literal

import jsonschema
import pydantic
import pytest
from support.calls import Calls
from support.routers.admission import LIMITS, chat_sent, of_schema, tool
from support.routers.enforced_schemas import A_AND_B, ENFORCED, INTEGER, STRING, Schema, of_object

from router.errors import InvalidField
from router.protocol.enforced_schemas import FORMATS, NEVER, GrammarParts
from router.protocol.grammars import check_schema

CHARACTERS = [chr(code) for code in range(128)]


class Grammar:
    """Schemas as engines compile them, over a vocabulary of single characters."""

    def __init__(self) -> None:
        import xgrammar
        from sglang.srt.constrained.json_schema_validation import validate_xgrammar_json_schema

        self.xgrammar = xgrammar
        self.check_as_engines = validate_xgrammar_json_schema
        tokens = xgrammar.TokenizerInfo(
            [*CHARACTERS, "<end>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[len(CHARACTERS)]
        )
        self._compiler = xgrammar.GrammarCompiler(tokens)

    def matcher(self, schema: Schema) -> Any:
        """Raises RuntimeError."""
        compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        return self.xgrammar.GrammarMatcher(compiled)

    def accepts(self, schema: Schema, text: str) -> bool:
        matcher = self.matcher(schema)
        return matcher.accept_string(text) and matcher.accept_token(len(CHARACTERS))

    def answer(self, schema: Schema, random: Random, most: int = 400) -> str | None:
        """What a model that answers at random would, None if it does not end."""
        matcher, found = self.matcher(schema), ""
        mask = self.xgrammar.allocate_token_bitmask(1, len(CHARACTERS) + 1)
        for _ in range(most):
            matcher.fill_next_token_bitmask(mask)
            words = mask.tolist()[0]
            allowed = [token for token in range(len(CHARACTERS) + 1) if words[token // 32] >> (token % 32) & 1]
            if not allowed:
                return None
            if len(CHARACTERS) in allowed and random.random() < 0.5:
                return found
            closing = [token for token in allowed if token < len(CHARACTERS) and CHARACTERS[token] in '"]}']
            token = random.choice(closing if closing and random.random() < 0.5 else allowed)
            if token == len(CHARACTERS):
                return found
            assert matcher.accept_token(token)
            found += CHARACTERS[token]
        return None


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    return Grammar()


def enforced_as(schema: Schema) -> Schema:
    """Raises InvalidField."""
    enforced: Schema = json.loads(json.dumps(schema))
    check_schema(enforced, "response_format.json_schema.schema", LIMITS, GrammarParts())
    return enforced


def is_valid(schema: Schema, text: str, *, is_strict: bool = True) -> bool:
    try:
        return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text, strict=is_strict))
    except json.JSONDecodeError:
        return False


# Each with the keyword that the error names, and answers that it forbids; the grammar accepts one, or is none at all.
NOT_ENFORCED: tuple[tuple[Schema, str, list[str]], ...] = (
    ({"allOf": [of_object({"a": INTEGER}, required=["a"]), of_object({"b": INTEGER})]}, "allOf", ["{}"]),
    ({**A_AND_B, "required": ["b"], "allOf": [of_object({"a": INTEGER}, required=["a"])]}, "properties", ['{"a": 1}']),
    ({"type": "string", "allOf": []}, "allOf", ["1"]),
    ({"$ref": "#/$defs/A", "maxLength": 2, "$defs": {"A": STRING}}, "maxLength", ['"abcd"']),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-7}, "maximum", [""]),
    ({"type": "number", "exclusiveMinimum": 9542443701.88}, "exclusiveMinimum", ["9542443701.88"]),
    ({"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.100001}, "exclusiveMinimum", [""]),
    ({"type": "number", "minimum": 5, "maximum": 4}, "minimum", []),
    ({"type": "integer", "minimum": 4.5}, "minimum", []),
    ({"type": "integer", "maximum": 2**64}, "maximum", []),
    ({"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 5}, "exclusiveMinimum", []),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum", []),
    ({"minimum": 5}, "minimum", ["4"]),
    ({"type": "number", "multipleOf": 5}, "multipleOf", ["4"]),
    ({"type": "integer", "minimum": 0, "multipleOf": 5}, "multipleOf", ["4"]),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems", ["[1, 1]"]),
    ({**A_AND_B, "dependentRequired": {"a": ["b"]}}, "dependentRequired", ['{"a": 1}']),
    ({**A_AND_B, "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas", ['{"a": 1}']),
    ({"$ref": "https://example.com/schema"}, "$ref", ["1"]),
    ({"$id": "https://example.com/a", "$defs": {"a": {"$id": "b", "type": "integer"}}, "$ref": "b"}, "$ref", ['"a"']),
    ({"$defs": {"a": {"$anchor": "b", "type": "integer"}}, "$ref": "#b"}, "$ref", ['"a"']),
    ({"$defs": {"a": {"$dynamicAnchor": "b", "type": "integer"}}, "$dynamicRef": "#b"}, "$dynamicRef", ['"a"']),
    ({"$ref": "#/$defs/none"}, "$ref", []),
    ({"$defs": {"a/b": INTEGER}, "$ref": "#/$defs/a~1b"}, "$ref", []),
    ({"anyOf": []}, "anyOf", [""]),
    ({"type": []}, "type", ["1"]),
    ({"type": "date"}, "type", []),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf", ["1"]),
    ({**A_AND_B, "anyOf": [of_object({"a": STRING})]}, "properties", ['{"a": ""}']),
    ({"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 5}]}, "type", ["1"]),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "maxLength", ['"aaa"']),
    ({"type": "string", "format": "date", "maxLength": 2}, "maxLength", ['"2020-01-01"']),
    ({"type": "string", "format": "date", "pattern": "^a$"}, "pattern", ['"2020-01-01"']),
    ({"pattern": "^a+$"}, "pattern", ['"b"']),
    ({"type": "string", "pattern": '^"a"$'}, "pattern", ['""a""']),
    ({"type": "string", "pattern": "^é.$"}, "pattern", ['"é""']),
    ({"type": "string", "pattern": "^.{1,200}$"}, "pattern", []),
    ({"type": "string", "pattern": r"^\u00e9*\u00e9\w$"}, "pattern", ['"w"']),
    ({"type": "string", "pattern": "a$b"}, "pattern", ['"ab"']),
    ({"type": "string", "pattern": "^(a$)+$"}, "pattern", ['"aa"']),
    ({"type": "string", "pattern": "^a{2, 3}$"}, "pattern", ['"aa"']),
    ({"type": "string", "pattern": "^[]a]$"}, "pattern", []),
    ({"type": "string", "pattern": r"^\U00000041$"}, "pattern", ['"U00000041"']),
    ({"type": "string", "format": "date", "minLength": 20}, "minLength", ['"2020-01-01"']),
    ({"not": STRING}, "not", ['"a"']),
    ({"type": "array", "items": INTEGER, "contains": {"const": 1}}, "contains", ["[2]"]),
    ({**A_AND_B, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if", ['{"a": 1}']),
    ({"type": "integer", "enum": [1, "a"]}, "enum", ['"a"']),
    ({"enum": [1, 7], "minimum": 5}, "minimum", ["1"]),
    ({"const": "a", "type": "integer"}, "const", ['"a"']),
    (of_object({"a": INTEGER}, additionalProperties=True), "additionalProperties", ['{"\\u0061": "x"}']),
    (of_object({"é": INTEGER}, additionalProperties=STRING), "additionalProperties", ['{"é": "x"}']),
    (of_object({"a": INTEGER}, unevaluatedProperties=STRING), "unevaluatedProperties", ['{"\\u0061": "x"}']),
    (of_object({"a": INTEGER}, patternProperties={"a": STRING}), "patternProperties", ['{"a": 1}']),
    (of_object({"a": INTEGER}, propertyNames={"const": "b"}), "propertyNames", ['{"a": 1}']),
    ({"type": "object", "minProperties": 1}, "minProperties", []),
    ({"patternProperties": {"^a$": INTEGER}}, "patternProperties", ['{"a": "x"}']),
    (of_object({"a": INTEGER}, required=["b"]), "required", ['{"a": 1}']),
    ({"type": "object", "required": ["b"]}, "required", ["{}"]),
    ({"required": ["b"]}, "required", ["{}"]),
    ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, "minProperties", ['{"a": 1, "a": 1}']),
    ({"type": "array", "minItems": 2}, "minItems", []),
    ({"type": "array", "items": [INTEGER]}, "items", []),
    ({"minItems": 2}, "minItems", ["[1]"]),
    (of_object({"a": False}), "properties.a", []),
    ({"type": "string", "minLength": 2.0}, "minLength", []),
)  # fmt: skip

# Refused, although xgrammar would enforce or ignore them as the standard says: enforced in no other combination, too
# large for its arithmetic, or of an older standard.
TOO_CAREFUL: tuple[tuple[Schema, str], ...] = (
    ({"enum": []}, "enum"),
    ({"const": 2**70 + 1}, "const"),
    ({"type": "integer", "multipleOf": 5}, "multipleOf"),
    (of_object({"a": INTEGER}, minProperties=1), "minProperties"),
    ({"type": "object", "patternProperties": {"^a$": INTEGER}}, "patternProperties"),
    ({"type": "object", "propertyNames": {"minLength": 2}, "additionalProperties": INTEGER}, "propertyNames"),
    ({"type": "object", "additionalProperties": INTEGER, "maxProperties": 2}, "maxProperties"),
    (of_object({"a": INTEGER}, unevaluatedProperties=False), "unevaluatedProperties"),
    ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": STRING}, "unevaluatedItems"),
    ({"dependencies": {"a": ["b"]}}, "dependencies"),
    ({"$ref": "#"}, "leads to itself"),
    ({"$defs": {"unused": {"not": INTEGER}}, "type": "integer"}, "$defs.unused.not"),
    (of_object({"x": {"$id": "y", "type": "string"}}), "properties.x.$id"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("schema", "forbidden", "permitted"), ENFORCED, ids=str)
def test_what_is_let_through_is_enforced(schema: Schema, forbidden: str, permitted: str, grammar: Grammar) -> None:
    enforced = enforced_as(schema)
    grammar.check_as_engines(enforced)
    assert grammar.accepts(enforced, permitted)
    assert is_valid(schema, permitted)
    assert not grammar.accepts(enforced, forbidden)


@pytest.mark.slow
@pytest.mark.parametrize(("schema", "keyword", "forbidden"), NOT_ENFORCED, ids=str)
def test_what_is_not_enforced_is_refused(schema: Schema, keyword: str, forbidden: list[str], grammar: Grammar) -> None:
    """If this fails for a later xgrammar, it has learnt to enforce the keyword."""
    with pytest.raises(InvalidField) as refused:
        enforced_as(schema)
    assert str(refused.value).startswith("response_format.json_schema.schema.")
    assert f".{keyword}: " in str(refused.value)
    assert refused.value.param == "response_format"
    if not forbidden:
        with pytest.raises(RuntimeError):
            grammar.accepts(schema, "1")
    for text in forbidden:
        assert keyword in ("$ref", "$dynamicRef") or not is_valid(schema, text)  # which the judge cannot resolve
        assert grammar.accepts(schema, text)


@pytest.mark.parametrize(("schema", "words"), TOO_CAREFUL, ids=str)
def test_the_doubtful_is_refused(schema: Schema, words: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(words)):
        enforced_as(schema)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = pydantic.Field(ge=0, le=9)


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    born: datetime.date


class Order(pydantic.BaseModel):
    """What models for structured output often have."""

    model_config = pydantic.ConfigDict(extra="forbid")
    id: uuid.UUID
    name: str = pydantic.Field(min_length=1, max_length=20, description="Of the customer")
    note: str | None = None
    count: int = pydantic.Field(default=1, ge=1, le=100)
    price: float = pydantic.Field(ge=0)
    color: Color = pydantic.Field(default=Color.RED, title="The color")
    colors: list[Color] = pydantic.Field(min_length=1)
    stock: dict[str, int]
    code: str = pydantic.Field(pattern=r"^[A-Z]{2}\d{4}$")
    pet: Cat | Dog = pydantic.Field(discriminator="kind")
    other: Cat | None
    pair: tuple[int, str]
    anything: Any = None
    parent: Order | None = None


@pytest.mark.slow
def test_schemas_of_pydantic_models_are_enforced(grammar: Grammar) -> None:
    schema = Order.model_json_schema()
    check_schema(schema, "schema", LIMITS, GrammarParts())
    order = Order(
        id=uuid.UUID(int=1), name="Kim", price=1.5, colors=[Color.BLUE], stock={"a": 1}, code="AB1234",
        pet=Cat(kind="cat", lives=9), other=None, pair=(1, "a"),
    )  # fmt: skip
    text = json.dumps(order.model_dump(mode="json"))
    assert grammar.accepts(schema, text)
    for wrong in ('"lives": 10', '"kind": "cow"', '"code": "ab1234"', '"price": -1.5', '"count": 0', '"name": ""'):
        name = wrong.partition(":")[0]
        assert not grammar.accepts(schema, re.sub(rf"{name}: [^,}}]+", wrong, text, count=1)), wrong


@pytest.mark.slow
@pytest.mark.parametrize("of_properties", [True, False])
def test_schemas_that_differ_in_what_annotations_are_called_are_told_apart(
    of_properties: bool, grammar: Grammar
) -> None:
    if of_properties:
        kinds = {"a": of_object({"title": INTEGER}), "b": of_object({"title": STRING})}
    else:
        kinds = {"a": {"const": {"title": 1}}, "b": {"const": {"title": ""}}}
    schema = of_object(kinds)
    colon = ": " if of_properties else ":"  # in a const
    wrong, right = f'{{"b": {{"title"{colon}1}}}}', f'{{"b": {{"title"{colon}""}}}}'
    assert grammar.accepts(schema, wrong)  # else the anchors are needed no more
    enforced = enforced_as(schema)
    assert grammar.accepts(enforced, right)
    assert not grammar.accepts(enforced, wrong)


def test_annotations_that_engines_refuse_are_left_out_of_what_they_get() -> None:
    def request(schema: Schema) -> tuple[Any, Any]:
        found = chat_sent(response_format=of_schema(schema), tools=[tool(strict=True, parameters=schema)])
        of_format, of_tool = found["response_format"]["json_schema"], found["tools"][0]["function"]
        return of_format["schema"], of_tool["parameters"]

    secret = of_object({"a": {**STRING, "format": "password", "minLength": 0}, "b": {"type": "array", "items": STRING}})
    secret["properties"]["b"]["uniqueItems"] = False
    assert request(secret) == (of_object({"a": STRING, "b": {"type": "array", "items": STRING}}),) * 2
    assert request(A_AND_B) == (A_AND_B,) * 2


def _random_schema(random: Random, depth: int = 0) -> Schema:
    def inner() -> Schema:
        return _random_schema(random, depth + 1)

    patterns = [
        "^[a-c]{2}$", "a|b", "^.$", r"^\d+$", r'^[^"]$', r"^\S+\s?$", "^.{0,99}$", "^a.{9,130}$", '^"', "x$y", "é|.",
    ]  # fmt: skip
    names = ["a", "b", "title", "default", 'q"\\/']
    makers = [
        lambda: {"type": random.choice(["integer", "number", "string", "boolean", "null"])},
        lambda: {"type": "integer", random.choice(["minimum", "exclusiveMinimum"]): random.choice([0, 1, 5, 10, -3])},
        lambda: {"type": "integer", "minimum": random.randint(-20, 99), "maximum": random.randint(100, 2100)},
        lambda: {
            "type": random.choice(["number", ["number", "null"], "integer"]),
            random.choice(["minimum", "exclusiveMinimum"]): random.choice([0, -1, 2.5, random.uniform(-9, 9), 1e8]),
            random.choice(["maximum", "exclusiveMaximum"]): random.choice([9, 2.5, round(random.uniform(0, 99), 6)]),
        },
        lambda: {"type": "string", random.choice(["minLength", "maxLength"]): random.randint(0, 3)},
        lambda: {"type": "string", "pattern": random.choice(patterns)},
        lambda: {"type": "string", "format": random.choice([*FORMATS, "other"])},
        lambda: random.choice([{"pattern": "a"}, {"minimum": 1}, {"minLength": 1}, {"minItems": 1}]),
        lambda: {"enum": [random.choice(["a", 'b"', 1, 2.5, None, True, {"k": ["é"]}]) for _ in range(2)]},
        lambda: {"const": random.choice(["a", 0, -1, 1e20, [], {}]), "title": "t"},
    ]  # fmt: skip
    if depth < 3:
        makers += [
            lambda: {"type": "array", "items": inner(), random.choice(["minItems", "maxItems"]): random.randint(0, 2)},
            lambda: {"type": "array", "prefixItems": [inner()], random.choice(["items", "uniqueItems"]): False},
            lambda: of_object(
                {name: inner() for name in random.sample(names, 3)}, required=random.choice([[], ["a"], [names[-1]]])
            ),
            lambda: of_object({each: inner() for each in ("x", "y")}),
            lambda: {"properties": {"a": inner()}, "additionalProperties": random.choice([True, False])},
            lambda: {"type": "object", random.choice(["propertyNames", "additionalProperties"]): inner()},
            lambda: {
                "type": "object",
                random.choice(["properties", "x"]): {random.choice(patterns): inner()},
                random.choice(["additionalProperties", "x"]): random.choice([False, True, inner()]),
            },
            lambda: {"type": "array", "prefixItems": [inner()], "items": random.choice([False, inner()])},
            lambda: {"const": {random.choice(names): random.randint(0, 2)}},
            lambda: {"anyOf": [inner(), inner()]},
            lambda: {"oneOf": [inner(), inner()]},
            lambda: {"allOf": [inner() for _ in range(random.choice([1, 1, 2]))]},
            lambda: {**inner(), "type": random.choice(["object", ["string", "null"], "integer"])},
            lambda: {**inner(), **inner()},
        ]  # fmt: skip
    return random.choice(makers)()


def test_the_page_names_what_is_never_enforced() -> None:
    page = (Path(__file__).parents[4] / "docs/api.md").read_text()
    page = page.split("### What a schema enforces")[1].split("\n## ")[0]
    assert [keyword for keyword in NEVER if f"`{keyword}`" not in page] == []
    assert [name for name in FORMATS if f"`{name}`" not in page] == []


def test_garbage_is_refused_or_let_through_and_nothing_else() -> None:
    seed = 3
    random = Random(seed)
    keywords = [
        "$ref", "$id", "type", "enum", "const", "anyOf", "oneOf", "allOf", "properties", "patternProperties",
        "propertyNames", "additionalProperties", "required", "minProperties", "maxProperties", "items", "prefixItems",
        "minItems", "maxItems", "pattern", "format", "minLength", "maxLength", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "not", "a",
    ]  # fmt: skip

    def value(depth: int) -> Any:
        leaf = random.choice([None, True, False, 0, -1, 1.5, 10**400, "a", "#", "#/a", "object", "string", "integer"])
        if depth > 3 or random.random() < 0.3:
            return leaf
        if random.random() < 0.4:
            return [value(depth + 1) for _ in range(random.randint(0, 3))]
        return {random.choice(keywords): value(depth + 1) for _ in range(random.randint(0, 4))}

    for number in range(5_000):
        schema = {random.choice(keywords): value(0) for _ in range(random.randint(1, 4))}
        try:
            check_schema(schema, "schema", LIMITS, GrammarParts())
        except InvalidField:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}, schema {number}: {schema}") from error


_THOUSAND = {"enum": list(range(1000))}


@pytest.mark.parametrize(
    "schema",
    [
        # Each of 64 enums is compared with all others.
        {"oneOf": [{"enum": list(range(i, i + 60))} for i in range(0, 6400, 100)]},
        # Each of 18 schemas has 64 references to enums of 5,000 values in all.
        {
            "$defs": {str(i): {"enum": list(range(i * 80, i * 80 + 80))} for i in range(60)},
            "type": "array",
            "prefixItems": [{"oneOf": [{"$ref": f"#/$defs/{i}"} for i in range(60)]} for _ in range(5)],
        },
        # 300 schemas refer to the same 4,000 values.
        {
            "$defs": {"a": of_object(dict.fromkeys("bcde", _THOUSAND), required=["b", "c", "d", "e"])},
            "type": "array",
            "prefixItems": [
                of_object({f"{i}": {"oneOf": [{"$ref": "#/$defs/a"}]} for i in range(first, first + 60)}, required=[])
                for first in range(0, 300, 60)
            ],
        },
        # Each of a thousand values is of the last of three thousand types.
        {**_THOUSAND, "type": [*["object"] * 3000, "integer"]},
    ],
    ids=["oneOf", "oneOf of references", "references from many", "types beside an enum"],
)  # fmt: skip
def test_what_a_schema_refers_to_often_is_read_once(schema: Schema) -> None:
    """The router serves nobody else meanwhile: comparing each pair anew takes up to half a minute, in 32 KiB."""
    text = json.dumps(schema, separators=(",", ":"))
    assert len(text) <= LIMITS.request.schema_bytes
    decoded = json.loads(text)  # in which no two schemas are one object
    with Calls(builtins=True) as calls:
        check_schema(decoded, "schema", LIMITS, GrammarParts())
    assert 1000 < calls.number < 1_000_000


@pytest.mark.slow
def test_random_answers_to_random_schemas_match_them(grammar: Grammar) -> None:
    seed = 40
    random, num_answers, verdicts = Random(seed), 0, {True: 0, False: 0}
    for number in range(1000):
        schema = _random_schema(random)
        try:
            enforced = enforced_as(schema)
        except InvalidField:
            verdicts[False] += 1
            continue
        verdicts[True] += 1
        grammar.check_as_engines(enforced)
        for _ in range(3):
            answer = grammar.answer(enforced, random)
            if answer is not None:
                num_answers += 1
                # Strings with a length may have control characters that are not escaped: docs/api.md says so.
                assert is_valid(schema, answer, is_strict=False), (
                    f"seed {seed}, schema {number}: {json.dumps(schema)} took {answer!r}"
                )
    assert min(*verdicts.values(), num_answers) > 200
