"""/v1/responses: the chat that a request becomes, and what is refused with the client's own names for it."""

import json
import sys
from functools import partial
from typing import Any

import pytest
from support.constants import with_constants
from support.routers.admission import LIMITS, USER, sent
from support.routers.admission import admit as admit_at

from cluster.config.limits import RequestLimits
from router.errors import InvalidField
from router.protocol.field_values import Limits
from router.protocol.responses.fields import NOT_OFFERED
from router.protocol.validation import Endpoint, validate

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
CALL["status"] = "completed"
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "7"}
ANSWER = {
    "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
    "content": [{"type": "output_text", "text": "Well", "annotations": [], "logprobs": []}],
}  # fmt: skip
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}


admit = partial(admit_at, Endpoint.RESPONSES)


def chat_of(**fields: Any) -> dict[str, Any]:
    """What an engine gets."""
    (found,) = sent(Endpoint.RESPONSES, **fields)
    return found


def test_a_text() -> None:
    assert chat_of() == {"messages": [USER]}
    assert chat_of(instructions="Be kind", input="Hi") == {"messages": [{"role": "system", "content": "Be kind"}, USER]}
    assert admit().endpoint.engine_path == "/v1/chat/completions"


def test_fields_become_those_of_a_chat() -> None:
    found = chat_of(
        max_output_tokens=5, temperature=0.5, top_p=0.9, parallel_tool_calls=False, user="u", stream=True,
        stream_options={"include_obfuscation": False}, reasoning={"effort": "low"}, tool_choice="auto",
        tools=[{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}],
        text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, "verbosity": "low"},
        metadata={"a": "b"}, store=False, background=False, truncation="disabled", include=[], service_tier="auto",
        prompt_cache_key="k", previous_response_id=None,
    )  # fmt: skip
    assert found == {
        "messages": [USER], "max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.9, "user": "u", "stream": True,
        "parallel_tool_calls": False, "reasoning_effort": "low", "tool_choice": "auto",
        "tools": [{"type": "function", "function": {
            "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    }  # fmt: skip
    assert admit(stream=True).includes_usage
    assert not admit().includes_usage
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in "fg"]
    named = chat_of(tools=tools, tool_choice={"type": "function", "name": "g"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "g"}}
    assert named["tools"] == [{"type": "function", "function": {"name": "g", "parameters": SCHEMA, "strict": True}}]
    for plain in ({"type": "text"}, None):
        assert "response_format" not in chat_of(text={"format": plain})
    assert chat_of(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}


def test_the_values_of_numbers_are_the_clients_bytes() -> None:
    body = b'{"model":"base","input":"caf\\u00e9","temperature":0.1000000000000000055511151231257827}'
    (sequence,) = validate(Endpoint.RESPONSES, body, LIMITS).sequences()
    assert bytes(sequence.fields["temperature"]) == b"0.1000000000000000055511151231257827"
    assert json.loads(bytes(sequence.fields["messages"])) == [{"role": "user", "content": "café"}]


def test_a_request_keeps_nothing_of_its_body() -> None:
    """Its messages have the same text again, so the bound on bytes in flight would be wrong by half."""
    asked = {
        "model": "base", "instructions": "Be kind", "input": [USER, CALL, OUTPUT], "max_output_tokens": 5,
        "temperature": 0.5, "tool_choice": "auto", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, "user": "u", "stream": True,
        "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s", "parallel_tool_calls": True,
    }  # fmt: skip
    body = json.dumps(asked).encode()
    before = sys.getrefcount(body)
    validated = validate(Endpoint.RESPONSES, body, LIMITS)
    assert validated.repeated is not None
    assert sys.getrefcount(body) == before


def test_the_items_of_one_answer_are_one_message() -> None:
    second = {**CALL, "call_id": "c2"}
    items = [
        {"role": "developer", "content": "Be kind"}, USER, REASONING, ANSWER, CALL, second, OUTPUT,
        {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "8"}]}, CALL, OUTPUT, ANSWER, ANSWER,
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    ]  # fmt: skip
    assert chat_of(input=items)["messages"] == [
        {"role": "system", "content": "Be kind"},
        USER,
        {"role": "assistant", "reasoning_content": "Hm", "content": "Well",
         "tool_calls": [CALLED, {**CALLED, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "tool", "tool_call_id": "c2", "content": "8"},
        {"role": "assistant", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "assistant", "content": "Well"},
        {"role": "assistant", "content": "Well"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]  # fmt: skip
    refusal = {**ANSWER, "content": [{"type": "refusal", "refusal": "No"}]}
    assert chat_of(input=[USER, refusal, USER])["messages"][1]["content"] == "No"
    summarised = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "short"}]}
    assert chat_of(input=[USER, summarised, CALL, OUTPUT])["messages"][1]["reasoning_content"] == "short"
    assert chat_of(input=[USER, {**CALL, "arguments": ""}, OUTPUT])["messages"][1]["tool_calls"][0]["function"] == {
        "name": "f", "arguments": "{}",
    }  # fmt: skip


# What the error names: the fields
REFUSED = {
    "responses are not stored; send the whole conversation": {"previous_response_id": "resp_1"},
    "store must be false": {"store": True},
    "background must be false": {"background": True},
    "background must be false (found 0.0)": {"background": 0.0},
    'truncation must be "disabled"': {"truncation": "auto"},
    "include must be []": {"include": ["message.output_text.logprobs"]},
    "use max_output_tokens": {"max_tokens": 5},
    "stop is not a field of /v1/responses; /v1/chat/completions takes it": {"stop": "x"},
    "mystery is not a field of /v1/responses; docs/api.md": {"mystery": 1},
    "tools[0].type 'web_search' is not offered: describe the tool as a function": {"tools": [{"type": "web_search"}]},
    "tools[1]": {"tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "g", "rid": "x"}]},
    "tools[0].parameters must be a JSON schema": {"tools": [{"type": "function", "name": "f", "parameters": "x"}]},
    "tool_choice.type 'allowed_tools'": {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
    "tool_choice must be one of": {"tool_choice": "sometimes"},
    "tool_choice must be one of auto": {"tool_choice": {"type": "function", "name": ""}},
    "max_output_tokens must be an integer from 1": {"max_output_tokens": 0},
    "text.format.type must be one of": {"text": {"format": {"type": "grammar"}}},
    "text.format of type json_schema needs": {"text": {"format": {"type": "json_schema", "name": "n"}}},
    "text.format.schema": {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"anyOf": [{}] * 65}}}},
    "text.verbosity": {"text": {"verbosity": "loud"}},
    "text must be": {"text": {"lora_path": "x"}},
    "reasoning.summary is not offered": {"reasoning": {"summary": "auto"}},
    "reasoning.effort must be one of": {"reasoning": {"effort": "heroic"}},
    "metadata must be an object of strings": {"metadata": {"a": 1}},
    "stream_options needs stream": {"stream_options": {}},
    "stream_options must be": {"stream": True, "stream_options": {"include_usage": True}},
    "input must have at least one item": {"input": []},
    "input must be a string or a list of items": {"input": 7},
    "input is required": {"input": None},
    "input[1]: Object contains unknown field `lora_path`": {"input": [USER, {**USER, "lora_path": "x"}]},
    "input[0].content[0]: Object contains unknown field `rid`": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "rid": "x"}]}]
    },
    "input[0].content[0].type: input_image is not offered: the model takes text": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}]
    },
    "input[0].role must be one of": {"input": [{"role": "tool", "content": "x"}]},
    "input[0].type: item_reference is not offered: items are not stored": {
        "input": [{"type": "item_reference", "id": "msg_1"}]
    },
    "input[1].type must be one of": {"input": [USER, {"type": "web_search_call", "id": "w"}]},
    "input[1].arguments must be a JSON object": {"input": [USER, {**CALL, "arguments": '{"a": '}]},
    "input[0].arguments are nested deeper": {"input": [{**CALL, "arguments": f'{{"a": {"[" * 200}{"]" * 200}}}'}]},
    "input[1].encrypted_content": {"input": [USER, {**REASONING, "encrypted_content": "x"}]},
    "input[0]: ": {"input": ["Hi"]},
    "input has more than 1024 items": {"input": [USER] * 1025},
    "input has": {"input": "x" * (4096 * 16)},
    "instructions has": {"instructions": "x" * (4096 * 16)},
    "129 tools|more than 128 tools": {"tools": [{"type": "function", "name": "f"}] * 129},
    "tools have": {"tools": [{"type": "function", "name": "f", "description": "x" * 2**17}]},
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_is_named(words: str) -> None:
    with pytest.raises(InvalidField) as refused:
        admit(**REFUSED[words])
    assert any(each in str(refused.value) for each in words.split("|")), refused.value
    for theirs in ("messages", "response_format", "max_completion_tokens", "reasoning_effort", ".function"):
        assert theirs not in str(refused.value)
        assert theirs not in (refused.value.param or "")


def test_a_schema_that_calls_must_match_is_bounded() -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"anyOf": [{}] * 65}}]
    assert chat_of(tools=tools)
    with pytest.raises(InvalidField, match=r"tools\[0\]\.parameters has"):
        admit(tools=tools, tool_choice="required")
    parts = [{"type": "input_text", "text": ""}] * 3
    limits = Limits(8, 1000, 4096, with_constants(RequestLimits, content_parts=2))
    with pytest.raises(InvalidField, match="input have 3 parts"):
        admit(limits, input=[{"role": "user", "content": parts}])


def test_what_is_not_offered_may_be_null() -> None:
    for name in NOT_OFFERED:
        admit(**{name: None})
