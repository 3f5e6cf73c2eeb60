"""Chat templates get what the router and SGLang's own chat endpoint give them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.slow
def test_contexts_have_the_ids_that_sglang_serves(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizer.save_pretrained(tmp_path)
    requests = [{"messages": messages, "tools": tools} for messages, tools in CONTEXTS.values()]
    asked = {"tokenizer": str(tmp_path), "templates": [_TEMPLATE, _FLAT_TOOLS], "requests": requests}
    script = Path(__file__).with_name("sglang_prompts.py")
    environment = os.environ | {"PYTHONPATH": str(script.parents[4])}
    done = subprocess.run(
        [sys.executable, script],
        input=json.dumps(asked),
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    served = json.loads(done.stdout[done.stdout.index('{"prompts"') :])
    assert {*ROLES, "root"} == {*served["roles"], "user"}  # routers refuse "root"
    for template, prompts in served["prompts"].items():
        monkeypatch.setattr(tokenizer, "chat_template", template)
        for (name, (messages, tools)), expected in zip(CONTEXTS.items(), prompts, strict=True):
            row = sft_row({"prompt": messages, "completion": [REPLY], "tools": tools})
            (turn,) = Encoder(tokenizer).turns(row)
            assert tokenizer.decode(turn.context) == tokenizer.decode(expected), name
            assert list(turn.context) == expected, name
