"""Structural tags take the same JSON as schemas do without their whitespace, by xgrammar itself."""

import json
from typing import Any

import pytest

xgrammar = pytest.importorskip("xgrammar")

from engine.hooks.requests.grammars import compiler_for  # noqa: E402

# Every byte is a token, and one more ends the text.
VOCABULARY = [chr(byte) if byte < 128 else f"<0x{byte:02X}>" for byte in range(256)] + ["</s>"]
TREE = {
    "type": "object",
    "properties": {"value": {"type": "number"}, "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
    "required": ["value", "next"],
}
SCHEMAS: list[tuple[Any, list[Any]]] = [
    ({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}, [{"city": 'é "Rome"\\\n>'}]),
    ({"enum": ["a\nb", 'é"', "\\x", "\t", "日本", "a]b", "%"]}, ["a\nb", 'é"', "\\x", "\t", "日本", "a]b", "%"]),
    ({"$ref": "#/$defs/tree", "$defs": {"tree": TREE}}, [{"value": 1.5, "next": {"value": -2, "next": None}}]),
    ({"type": "string", "pattern": "^[a-z]{2,4}\\d+$"}, ["ab12"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [[1, 2, 3]]),
    ({"type": "object"}, [{"a": [1, {"b": None}]}, {}]),
    ({}, [{"a": 1}, [1, 2], "x", True, None]),
    (True, [{"a": 1}]),
]


INFO = xgrammar.TokenizerInfo(VOCABULARY, xgrammar.VocabType.BYTE_FALLBACK, stop_token_ids=[256])


@pytest.fixture(scope="module")
def compiler() -> Any:
    return compiler_for(INFO)


def takes(grammar: Any, text: str) -> bool:
    return xgrammar.GrammarMatcher(grammar).accept_string(text)


def legacy_tag(schema: Any) -> Any:
    item = xgrammar.StructuralTagItem(begin="<call>", schema=json.dumps(schema), end="</call>")
    return xgrammar.StructuralTag.from_legacy_structural_tag([item], ["<call>"])


def tag(schema: Any) -> str:
    content = {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": schema}]}
    return json.dumps(
        {"type": "structural_tag", "format": {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}}
    )


@pytest.mark.parametrize("make", [legacy_tag, tag])
@pytest.mark.parametrize(("schema", "values"), SCHEMAS)
def test_a_tag_takes_json_without_whitespace(compiler: Any, schema: Any, values: list[Any], make: Any) -> None:
    grammar = compiler.compile_structural_tag(make(schema))
    original = xgrammar.GrammarCompiler(INFO).compile_structural_tag(make(schema))
    for value in values:
        text = json.dumps(value, ensure_ascii=False)
        assert takes(grammar, f"<call>{text}</call>"), text
        if value and isinstance(value, (dict, list)):
            spaced = json.dumps(value, ensure_ascii=False, indent=8)
            assert takes(original, f"<call>{spaced}</call>")
            assert not takes(grammar, f"<call>{spaced}</call>"), spaced


def test_what_a_schema_forbids_is_forbidden(compiler: Any) -> None:
    grammar = compiler.compile_structural_tag(legacy_tag(SCHEMAS[0][0]))
    for text in ("-4", "-Infinity", "{}", '{"city": 1}', '{"city": "Rome", "days": 1}', '{ "city": "Rome"}'):
        assert not takes(grammar, f"<call>{text}</call>"), text


def test_parameters_as_xml_stay_as_they_are(compiler: Any) -> None:
    schema = {"type": "object", "properties": {"json_schema": {"type": "string"}}, "required": ["json_schema"]}
    content = {"type": "json_schema", "json_schema": schema, "style": "qwen_xml"}
    text = json.dumps({"type": "structural_tag", "format": content})
    grammar = compiler.compile_structural_tag(text)
    assert takes(grammar, "<parameter=json_schema>Rome</parameter>")


def test_a_schema_that_does_not_compile_is_an_error_that_sglang_expects(compiler: Any) -> None:
    with pytest.raises(RuntimeError):
        compiler.compile_structural_tag(legacy_tag({"type": "no such type"}))


@pytest.mark.parametrize("is_required", [False, True])
def test_calls_that_are_required_come_alone(compiler: Any, is_required: bool) -> None:
    tag, call = legacy_tag(SCHEMAS[0][0]), '<call>{"city": "Rome"}</call>'
    tag.format.at_least_one = is_required  # as SGLang has it
    grammar = compiler.compile_structural_tag(tag)
    assert takes(grammar, f"{call}\n{call}")
    assert takes(grammar, f"{call} And") is not is_required
