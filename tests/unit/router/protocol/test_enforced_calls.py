"""What engines are asked to enforce: the schemas of strict tools, and of all tools that a required call may be of."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.routers.admission import LIMITS, USER, chat_sent, of_schema, tool

from router.errors import InvalidField
from router.protocol.validation import Endpoint, validate

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
NONE = {"type": "object", "properties": {}}
NODE = {"type": "object", "properties": {"next": {"type": "object"}}}
OWN_NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
NAMED = {"type": "function", "function": {"name": "b"}}


def enforced(tools: list[dict[str, Any]], choice: Any) -> list[tuple[str, Any, Any]]:
    functions = [each["function"] for each in chat_sent(tools=tools, tool_choice=choice)["tools"]]
    return [(each["name"], each.get("strict"), each.get("parameters")) for each in functions]


def test_a_required_call_is_of_its_schema() -> None:
    tools = [tool("a", parameters=CITY, description="d"), tool("b", parameters=NODE, strict=False)]
    assert enforced(tools, "required") == [("a", True, CITY), ("b", True, NODE)]
    assert enforced(tools, NAMED) == [("b", True, NODE)]
    assert chat_sent(tools=tools, tool_choice="required")["tools"][0]["function"]["description"] == "d"


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_call_that_may_be_is_as_the_client_says(choice: str | None) -> None:
    tools = [tool("a", parameters=CITY), tool("b"), tool("c", parameters={"type": "string"}, strict=False)]
    assert chat_sent(tools=tools, tool_choice=choice)["tools"] == tools


def test_a_strict_tool_without_parameters_takes_none() -> None:
    tools = [tool("a", strict=True), tool("b", parameters=CITY, strict=True), tool("c", parameters={"type": "string"})]
    found = enforced(tools, "auto")
    assert found == [("a", True, NONE), ("b", True, CITY), ("c", None, {"type": "string"})]


@pytest.mark.parametrize("none", [{}, {"parameters": None}, {"parameters": {}}])
def test_no_parameters_are_an_empty_object(none: dict[str, Any]) -> None:
    assert enforced([tool("b", **none)], NAMED) == [("b", True, NONE)]


def test_numbers_of_a_schema_stay_as_they_are() -> None:
    body = (
        b'{"model":"base","messages":[{"role":"user","content":"Hi"}],"tool_choice":"required","tools":[{"type":'
        b'"function","function":{"name":"a","parameters":{"type":"object","default":1.50e2}}}]}'
    )
    assert b'"default":1.50e2' in bytes(validate(Endpoint.CHAT, body, LIMITS).fields["tools"])


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"city": {"type": "string"}}},
        {"$ref": "#/$defs/node", "$defs": {"node": OWN_NODE}},
        {"$ref": "#/definitions/node", "definitions": {"node": NODE}},
    ],
)
def test_schemas_of_objects(schema: dict[str, Any]) -> None:
    assert enforced([tool("b", parameters=schema)], "required") == [("b", True, schema)]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"}, {"type": "dict"}, {"type": ["object", "null"]}, {"enum": ["Rome"]},
        {"city": {"enum": ["Rome"]}}, {"type": "array", "properties": {}}, {"$ref": "#/$defs/no"},
        {"$ref": "#/$defs/node", "$defs": {"node": {"type": "string"}}}, {"$ref": "https://example.com/a", "https:": 1},
    ],
)  # fmt: skip
@pytest.mark.parametrize("choice", ["required", NAMED, "auto"])
def test_arguments_are_objects(schema: dict[str, Any], choice: Any) -> None:
    tools = [tool("b", parameters=schema, strict=choice == "auto")]
    reasons = r'( must have "type": "object"|\.type: must be|\.\$ref: )'  # a schema that is none is refused as such
    with pytest.raises(InvalidField, match=r"tools\[0\]\.function\.parameters" + reasons):
        chat_sent(tools=tools, tool_choice=choice)


def test_an_answers_format_does_not_replace_the_calls() -> None:
    """SGLang enforces one grammar, and would take the format's."""
    tools = [tool("a", parameters=CITY)]
    assert "response_format" not in chat_sent(tools=tools, tool_choice="required", response_format=of_schema(CITY))
    assert chat_sent(tools=tools, response_format=of_schema(CITY))["response_format"] == of_schema(CITY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [tool("a")], "tool_choice": NAMED}, "'b', which is not among the tools"),
        ({"tool_choice": NAMED}, "'b', which is not among the tools"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [], "tool_choice": "required"}, "there are no tools"),
        ({"tools": [tool("b")], "tool_choice": NAMED, "regex": "a"}, "regex and tool_choice exclude each other"),
        (
            {"tools": [tool("a", strict=True, parameters={**NODE, "$defs": {"node": NODE}}),
                       tool("b", strict=True, parameters={**NODE, "$defs": {"node": CITY}})]},
            "tools\\[1\\].*'node' differs from that of another tool",
        ),
    ],
)  # fmt: skip
def test_what_engines_would_not_enforce_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        chat_sent(**fields)


@pytest.mark.parametrize(
    ("most", "why", "of"),
    [
        (16, "16 strings with a maximum", lambda i: {"type": "string", "maxLength": i + 2}),
        (16, "16 strings with a maximum", lambda i: {"type": "string", "minLength": i + 2}),
        (64, "64 arrays with a maximum", lambda i: {"type": "array", "items": {"type": "string"}, "maxItems": i + 2}),
        (16, "more than 16 patterns", lambda i: {"type": "string", "pattern": f"a{i}"}),
        (2, "more than 1500 characters", lambda i: {"type": "string", "pattern": f"(a{{60}}){{10}}{i}"}),
        (2, "over 1024 bytes", lambda i: {"type": "string", "pattern": f"[{'ab' * 250}]{i}"}),
    ],
)
def test_what_is_dear_is_limited_for_all_tools_of_a_grammar(most: int, why: str, of: Callable[[int], Any]) -> None:
    """Engines compile all of them as one grammar: a string with a maximum length takes seconds."""

    def tools(number: int) -> list[dict[str, Any]]:
        return [tool(f"f{i}", parameters={"type": "object", "properties": {"a": of(i)}}) for i in range(number)]

    def strict(number: int) -> list[dict[str, Any]]:
        return [{**each, "function": {**each["function"], "strict": True}} for each in tools(number)]

    assert len(chat_sent(tools=strict(most))["tools"]) == most
    assert len(chat_sent(tools=tools(most), tool_choice="required")["tools"]) == most
    for asked in ({"tools": strict(most + 1)}, {"tools": tools(most + 1), "tool_choice": "required"}):
        with pytest.raises(InvalidField, match=why):
            chat_sent(**asked)
    assert len(chat_sent(tools=tools(most + 1))["tools"]) == most + 1
    named = {"type": "function", "function": {"name": "f1"}}
    assert [each[0] for each in enforced(strict(most + 1), named)] == ["f1"]


def test_strings_that_must_not_be_empty_are_not_counted() -> None:
    properties = {f"a{i}": {"type": "string", "minLength": 1} for i in range(60)}
    assert chat_sent(tools=[tool(strict=True, parameters={"type": "object", "properties": properties})])


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (lambda: [{"type": "object", "properties": {f"p{i}": {} for i in range(4094)}}] * 2, None),
        (lambda: [{"type": "object", "properties": {f"p{i}": {} for i in range(4095)}}] * 2, "over 8192 objects"),
        (lambda: [{"allOf": [True] * 1000}] * 8, None),
        (lambda: [{"allOf": [True] * 1000}] * 9, "over 8192 objects"),
        (lambda: [{"type": [1, *map(str, range(999))]}], None),
        (lambda: [{"items": {"type": [1, *map(str, range(1000))]}}], r"tools\[0\].*a list of 1001 items"),
        (lambda: [{"pattern": "[a-z]" * 3276}] * 2, None),
        (lambda: [{"pattern": "[a-z]" * 3277}] * 2, "over 32768 bytes"),
        (lambda: [{"items": {"pattern": "[Ā-\uffff]" * 64}}] * 2, None),
        (lambda: [{"items": {"pattern": "[Ā-\uffff]" * 65}}] * 2, "over 32768 bytes"),
        (lambda: [{"patternProperties": {r"(?i)[\u0100-\uffff]" * 60: {}}}], "over 32768 bytes"),
        (lambda: [{"dependencies": {"a": [{}] * 1001}}], r"tools\[0\].*a list of 1001 items"),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_what_engines_check_in_their_event_loop_is_limited(
    of: Callable[[], list[Any]], why: str | None, choice: str
) -> None:
    """Also of tools whose parameters are not enforced: 128 KiB of them took SGLang seconds."""
    tools = [tool(f"f{i}", parameters=each) for i, each in enumerate(of())]
    if why is None:
        assert chat_sent(tools=tools, tool_choice=choice)["tools"] == tools
        return
    with pytest.raises(InvalidField, match=why):
        chat_sent(tools=tools, tool_choice=choice)


@pytest.mark.parametrize("strict", [True, False])
def test_numbers_beyond_float64_are_refused(strict: bool) -> None:
    """They are JSON, but neither the router nor engines can read them."""
    written = f'"strict":{json.dumps(strict)},"parameters":{{"type":"object","maximum":1e999}}'
    body = f'{{"model":"base","messages":[{json.dumps(USER)}],"tools":[{{"function":{{"name":"f",{written}}}}}]}}'
    with pytest.raises(InvalidField, match=r"tools\[0\].function.parameters cannot be read: Number out of range"):
        validate(Endpoint.CHAT, body.encode(), LIMITS)
    body = '{"model":"base","input":"Hi","tool_choice":{"type":1e999}}'
    with pytest.raises(InvalidField, match="tool_choice must be auto"):
        validate(Endpoint.RESPONSES, body.encode(), LIMITS)
