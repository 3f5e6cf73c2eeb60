"""Messages reach chat templates in one form, whichever of OpenAI's spellings a client uses; errors name the message."""

from typing import Any

import pytest
from support.router_stand_ins import ClusterStandIn
from support.routers.admission import USER, admit, chat_sent, tool

from router.errors import InvalidField
from router.protocol.messages import PARTS, ROLES
from router.protocol.validation import Endpoint


def served(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that engines get."""
    return chat_sent(messages=messages)["messages"]


def calling(arguments: Any, **call: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "c", **call, "function": {"name": "f", "arguments": arguments}}]}


ROLES_OF_ENGINES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_templates_get_the_roles_that_they_know(role: str) -> None:
    for spelling in (role, role.upper(), role.title()):
        (message,) = served({"role": spelling, "content": "a", "name": "n"})
        assert message == {"role": ROLES_OF_ENGINES[role], "content": "a", "name": "n"}


async def test_chats_responses_and_tokens_have_one_mapping_of_roles(cluster: ClusterStandIn) -> None:
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    for path, name in (("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/tokenize", "messages")):
        status, answer, _ = await cluster.post(path, **{name: messages})
        assert status == 200, answer
    asked = [each for worker in cluster.workers for each in worker.engine.requests if "messages" in each]
    assert len(asked) >= 3
    for each in asked:
        assert [message["role"] for message in each["messages"]] == ["system", "user"]


def test_a_call_without_arguments_has_none() -> None:
    for arguments in ("", None):
        (message,) = served(calling(arguments, index=None, type="function"))
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": "{}"}
        assert (call["id"], call["type"]) == ("c", "function")
    given = calling('{"a": 1}')
    assert served(given) == [given]


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1]", "null", '"a"', "{} {}", '{"a": NaN}', " "])
def test_arguments_that_templates_cannot_read_are_named(arguments: str) -> None:
    with pytest.raises(InvalidField) as refused:
        served(USER, {**calling("{}"), "tool_calls": [*calling("{}")["tool_calls"], *calling(arguments)["tool_calls"]]})
    assert "messages[1].tool_calls[1].function.arguments must be a JSON object" in str(refused.value)
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    with pytest.raises(InvalidField, match=r"input\[0\].arguments must be a JSON object"):
        admit(Endpoint.RESPONSES, input=[item])


def test_an_unknown_field_that_is_null_is_absent_at_every_depth() -> None:
    message = calling("{}", caller=None, type=None)
    message["tool_calls"][0]["function"]["parsed"] = None
    part = {"type": "text", "text": "a", "annotations": None}
    plain = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert served({**USER, "content": [part], "container": None}, {**message, "new": None}) == [plain, calling("{}")]
    parameters = {"type": "object", "a": None}  # a schema's nulls are its own
    nested = {"type": "function", "caller": None, "function": {"name": "f", "eager": None, "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "f", "x": None}, "y": None}
    schema = {"type": "json_schema", "x": None, "json_schema": {"name": "n", "schema": {}, "y": None}}
    options = {"include_usage": True, "new": None}
    found = chat_sent(tools=[nested], tool_choice=choice, response_format=schema, stream=True, stream_options=options)
    assert found["tools"] == [tool(parameters=parameters, strict=True)]
    content = [{"type": "input_text", "text": "a", "x": None}]
    item = {"type": "message", "role": "user", "phase": None, "content": content}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "", "namespace": None}
    admit(Endpoint.RESPONSES, input=[item, call], tools=[{"type": "function", "name": "f", "defer_loading": None}])
    for wrong in ({**USER, "new": 0}, {**USER, "content": [{**part, "new": False}]}, calling("{}", caller={"a": None})):
        with pytest.raises(InvalidField, match="unknown field"):
            served(wrong)


# What the error says: the messages
REFUSED: dict[str, tuple[dict[str, Any], ...]] = {
    "messages[1].content is required: a string or a list of parts": (USER, {"role": "user"}),
    "messages[0].content is required": ({"role": "User", "content": None},),
    "messages[0].content[1].type must be one of text, thinking, reasoning, refusal, tool_reference: the model takes "
    "text (found 'image_url')": (
        {"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "http://example.com"}}]},
    ),
    "messages[0].content[0].type must be": ({"role": "user", "content": [{"text": "a"}]},),
    "messages[0].content[0].text is required": ({"role": "user", "content": [{"type": "text"}]},),
    "messages[0].content[0].refusal is required": ({"role": "assistant", "content": [{"type": "refusal"}]},),
    "messages[0].content[0].name is required": ({"role": "user", "content": [{"type": "tool_reference"}]},),
    "messages[0].content[0]: parts of type thinking belong to assistants": (
        {"role": "user", "content": [{"type": "thinking", "thinking": "a"}]},
    ),
    "messages[0].content[0] needs either thinking or text": (
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "text": "b"}]},
    ),
    "messages[0].tool_calls[0].type must be function (found 'custom')": (calling("{}", type="custom"),),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_engines_would_refuse_is_named(words: str) -> None:
    with pytest.raises(InvalidField) as refused:
        served(*REFUSED[words])
    assert words in str(refused.value)


def test_every_accepted_part_is_one_that_engines_take() -> None:
    """Engines know no refusals; they are text."""
    payloads = {"text": "text", "thinking": "thinking", "reasoning": "text", "refusal": "refusal"}
    for kind in PARTS:
        part = {"type": kind, payloads.get(kind, "name"): "a"}
        expected = {"type": "text", "text": "a"} if kind == "refusal" else part
        assert served({"role": "assistant", "content": [part]}) == [{"role": "assistant", "content": [expected]}]
