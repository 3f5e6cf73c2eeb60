"""Chat templates get what the router and SGLang's own chat endpoint give them."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
from transformers import AutoTokenizer

from router.protocol.messages import Message, changes_for_templates
from training.data.columns import ROLES, sft_row
from training.data.tokens import Encoder

# Shows everything that a template gets, in its order. An answer ends as the tokenizer's answers end.
_TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}"
)
_FLAT_TOOLS = "{% for tool in tools or [] %}{{ tool.name + ';' }}{% endfor %}" + _TEMPLATE
ASK, REPLY = {"role": "user", "content": "How deep?", "name": "kim"}, {"role": "assistant", "content": "Very."}
CALL = {"id": "call-1", "type": "function", "function": {"arguments": '{"b": 1, "a": [2.5, null]}', "name": "depth"}}
TOOL = {
    "function": {
        "name": "depth",
        "parameters": {"type": "object", "properties": {"b": {"type": "integer"}}},
        "description": "Of the sea",
        "other": 1,
    },
    "type": "function",
}
CONTEXTS: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "plain": ([{"role": "system", "content": "Be short.", "extra": 1}, ASK], None),
    "no tools": ([ASK], []),
    "tools": ([ASK], [TOOL, {"function": {"name": "b", "strict": True}, "defer_loading": True}]),
    "calls": (
        [
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [CALL, {"function": {"name": "depth"}}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "depth", "arguments": ""}}, CALL]},
            {"role": "tool", "content": "9 m", "tool_call_id": "call-1", "name": "depth"},
        ],
        [TOOL],
    ),
    "arguments that are an object": (
        [ASK, {"tool_calls": [{"function": {"arguments": {"b": 1}}}], "role": "assistant"}, ASK],
        [TOOL],
    ),
    "thoughts": ([ASK, REPLY | {"reasoning_content": "Hm.", "tool_calls": []}, ASK], None),
    "ends with an answer": ([ASK, REPLY | {"reasoning_content": "Hm."}], None),
    "other roles": ([{"role": role, "content": "a"} for role in ("developer", "function", "latest_reminder")], None),
}


@pytest.fixture
def endpoint(sglang: None, tokenizer: Any, tmp_path: Path) -> Any:
    """SGLang's chat endpoint, with what its constructor takes from a running engine."""
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.parser.template_manager import TemplateManager

    tokenizer.save_pretrained(tmp_path)
    endpoint = object.__new__(OpenAIServingChat)
    endpoint.tokenizer_manager = SimpleNamespace(
        tokenizer=AutoTokenizer.from_pretrained(tmp_path, local_files_only=True),
        served_model_name="base",
        server_args=SimpleNamespace(reasoning_parser=None),
    )
    endpoint.template_manager = TemplateManager()
    endpoint.template_manager._jinja_template_content_format = "string"
    endpoint.default_chat_template_kwargs = endpoint.chat_encoding_spec = endpoint.tool_call_parser = None
    endpoint.reasoning_parser = endpoint._encoding_adapter = endpoint._reasoning_detector = None
    endpoint._prompt_text_round_trip_is_lossy = False
    endpoint.is_gpt_oss = endpoint.is_gemma4 = endpoint.is_minimax_m3 = False
    endpoint._tokenizer_auto_adds_specials = True
    return endpoint


def served_ids(endpoint: Any, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[int]:
    """Of the prompt that SGLang makes of a request after the router."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    changed = copy.deepcopy(messages)
    for message in changed:
        known = {name: message[name] for name in Message.__struct_fields__ if name in message}
        message.update(changes_for_templates(msgspec.convert(known, Message)))
    request = ChatCompletionRequest(model="base", messages=changed, tools=tools)
    return endpoint._process_messages(request, False).prompt_ids


@pytest.mark.slow
@pytest.mark.parametrize("template", [_TEMPLATE, _FLAT_TOOLS])
def test_contexts_have_the_ids_that_sglang_serves(endpoint: Any, tokenizer: Any, monkeypatch, template: str):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    endpoint.tokenizer_manager.tokenizer.chat_template = template
    endpoint.template_manager._run_template_detection(template, endpoint.tokenizer_manager.tokenizer)
    for name, (messages, tools) in CONTEXTS.items():
        row = sft_row({"prompt": messages, "completion": [REPLY], "tools": tools})
        (turn,) = Encoder(tokenizer).turns(row)
        expected = served_ids(endpoint, messages, tools)
        assert tokenizer.decode(turn.context) == tokenizer.decode(expected), name
        assert list(turn.context) == expected, name


@pytest.mark.slow
def test_roles_are_those_of_sglang(sglang: None):
    from sglang.srt.entrypoints.openai import protocol

    assert {*ROLES, "root"} == {*get_args(protocol._GenericMessageRole), "user"}  # routers refuse "root"
