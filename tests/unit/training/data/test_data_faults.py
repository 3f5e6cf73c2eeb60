"""Every fault of the data is told with its file and row, before training begins."""

from pathlib import Path
from typing import Any

import pytest

from training.data import jsonl
from training.data.columns import preference_row, sft_row
from training.data.examples import load
from training.data.tokens import Encoder
from training.errors import DataInvalid

GOOD = {"prompt": "The sea is", "completion": " wide."}
GOOD_PAIR = {"prompt": "The sea is", "chosen": " wide.", "rejected": " dry."}
ASK, REPLY = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}

SFT_FAULTS: dict[str, tuple[Any, str]] = {
    "not JSON": ("{nope", "not JSON"),
    "deep JSON": ("[" * 100_000, "not JSON"),
    "no object": ([1], "a list, not an object"),
    "other columns": ({"text": "The sea is wide."}, r"the columns are 'text'; it needs `prompt` and `completion`"),
    "no columns": ({}, "the columns are none"),
    "null": ({"prompt": "a", "completion": None}, "it needs `prompt` and `completion`"),
    "two shapes": ({"messages": [ASK, REPLY], "prompt": "a"}, "has `messages` and `prompt`"),
    "empty answer": ({"prompt": "a", "completion": "  "}, "`completion` is an empty answer"),
    "empty chat answer": ({"messages": [ASK, {"role": "assistant", "content": ""}]}, "message 2 of `messages` is an"),
    "no context": ({"prompt": "", "completion": "a"}, "no context: `prompt` is empty"),
    "no context of a chat": ({"messages": [REPLY, ASK, REPLY]}, "no context: the first message is an answer"),
    "no answer": ({"messages": [ASK]}, "no message of the role 'assistant'"),
    "mixed": ({"prompt": [ASK], "completion": "a"}, "`prompt` is a list, `completion` is a str"),
    "content of parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, REPLY]},
        "message 1 of `messages`: `content` is a list",
    ),
    "no content": ({"messages": [{"role": "user"}, REPLY]}, "`content` is a NoneType"),
    "no role": ({"messages": [{"content": "a"}, REPLY]}, "an object with `role` and `content`"),
    "a role that workers refuse": ({"messages": [ASK | {"role": "human"}, REPLY]}, "the role is 'human'; workers take"),
    "no messages": ({"messages": []}, "it is a list of messages"),
    "over-long": ({"prompt": "a " * 90, "completion": "b"}, r"prompt and answer have \d+ tokens, at most 64"),
    "own template": (
        {"messages": [ASK, REPLY], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "'chat_template', which is no variable",
    ),
    "nested argument": ({"messages": [ASK, REPLY], "chat_template_kwargs": {"a": {}}}, "'a' is no single value"),
    "no character": ({"prompt": "a\ud800", "completion": "b"}, "half a surrogate pair"),
    "no character in a chat": ({"messages": [ASK, REPLY | {"content": "a\udc00"}]}, "half a surrogate pair"),
    "over-long later turn": ({"messages": [ASK, REPLY] * 30}, "over-long: prompt and answer have"),
    "a tool without a function": ({"messages": [ASK, REPLY], "tools": [{"name": "a"}]}, "which has no `function`"),
    "a tool without a name": ({"messages": [ASK, REPLY], "tools": [{"function": {}}]}, "`name` of a tool is a NoneT"),
    "arguments that are no object": (
        {"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}]},
        "`arguments` of a tool call are '\\[1\\]'; they must be a JSON object",
    ),
    "arguments that are no JSON": (
        {"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": {"arguments": '{"a": NaN}'}}]}]},
        "they must be a JSON object",
    ),
    "a call without a function": ({"messages": [ASK, REPLY | {"tool_calls": [{"name": "a"}]}]}, "has no `function`"),
    "tools of a message": ({"messages": [ASK | {"tools": []}, REPLY]}, "a message has `tools`"),
    "tools": ({"messages": [ASK, REPLY], "tools": "depth"}, "`tools` is a str"),
}  # fmt: skip
PAIR_FAULTS: dict[str, tuple[Any, str]] = {
    "sft columns": (GOOD, "it needs `prompt`, `chosen` and `rejected`"),
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "nothing to prefer"),
    "empty rejected": ({"prompt": "a", "chosen": "b", "rejected": ""}, "`rejected` is an empty answer"),
    "no prompt": ({"chosen": "ab", "rejected": "ac"}, "there is no `prompt`"),
    "other contexts": (
        {"chosen": [ASK, REPLY], "rejected": [ASK | {"content": "How?"}, REPLY | {"content": "b"}]},
        "differ before their last message",
    ),
    "no context": ({"chosen": [REPLY], "rejected": [{"role": "assistant", "content": "b"}]}, "no context"),
    "several answers": ({"prompt": [ASK], "chosen": [REPLY, ASK], "rejected": [REPLY]}, "`chosen` has 2 messages"),
    "no answer": ({"prompt": [ASK], "chosen": [ASK], "rejected": [REPLY]}, "one of the role 'assistant' is compared"),
    "over-long rejected": ({"prompt": "a", "chosen": "b", "rejected": "c " * 90}, "over-long"),
}  # fmt: skip


FAULTS = [
    *(pytest.param(GOOD, *each, sft_row, id=f"sft: {name}") for name, each in SFT_FAULTS.items()),
    *(pytest.param(GOOD_PAIR, *each, preference_row, id=f"pairs: {name}") for name, each in PAIR_FAULTS.items()),
]


@pytest.mark.parametrize(("good", "row", "message", "read"), FAULTS)
def test_a_row_at_fault_is_told(good: Any, row: Any, message: str, read: Any, encoder: Encoder, write_rows):
    path = write_rows(good, row, good)
    with pytest.raises(DataInvalid, match=message) as raised:
        load([path], encoder, read, 64)
    (fault,) = raised.value.faults
    assert fault.startswith(f"{path}, row 2: ")


def test_bytes_that_are_no_text(encoder: Encoder, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "completion": "b"}\n')
    with pytest.raises(DataInvalid, match="row 1: not UTF-8 at byte 12"):
        load([path], encoder, sft_row, 64)


def test_a_huge_row_is_not_read_whole(encoder: Encoder, write_rows, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jsonl, "MAX_ROW_BYTES", 100)
    path = write_rows(GOOD, GOOD | {"prompt": "a" * 1000}, GOOD | {"completion": ""})
    assert max(len(row.line) for row in jsonl.read_rows([path])) == 101
    with pytest.raises(DataInvalid, match=r"row 2: over 100 bytes(.|\n)*row 3: `completion` is an empty"):
        load([path], encoder, sft_row, 64)


def test_all_faults_are_told_at_once_and_the_first_ten_are_shown(encoder: Encoder, write_rows):
    first = write_rows(GOOD, *[{"prompt": "", "completion": "a"}] * 11, name="first.jsonl")
    second = write_rows("x", name="second.jsonl")
    with pytest.raises(DataInvalid) as raised:
        load([first, second], encoder, sft_row, 64)
    assert len(raised.value.faults) == 12
    assert raised.value.faults[-1].startswith(f"{second}, row 1: not JSON")
    text = str(raised.value)
    assert text.startswith("12 of 13 rows cannot be trained on:\n")
    assert text.endswith("and 2 more")


def test_nothing_to_train_on(encoder: Encoder, write_rows):
    with pytest.raises(DataInvalid, match=r"empty.jsonl: there is no row"):
        load([write_rows(name="empty.jsonl")], encoder, sft_row, 64)
    path = write_rows({"prompt": "a " * 90, "completion": "b"})
    with pytest.raises(DataInvalid, match="1 were left out as over-long"):
        load([path], encoder, sft_row, 64, leave_out_long=True)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (  # the prompt announces a thought that the conversation leaves out
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|><think>{% endif %}",
            r"no prefix of the conversation",
        ),
        ("{{ raise_exception('roles must alternate') }}", "the chat template refuses it: roles must alternate"),
        ("{{ messages[7].content.x }}", "the chat template refuses it"),
        ("{% for m in messages %}{{ m.content[0] / 0 }}{% endfor %}", "the chat template refuses it"),
        (None, "the tokenizer has no chat template"),
    ],
)
def test_a_template_that_cannot_be_trained_with(
    template: str | None, message: str, tokenizer: Any, write_rows, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    path = write_rows({"messages": [ASK, REPLY]})
    with pytest.raises(DataInvalid, match=message) as raised:
        load([path], Encoder(tokenizer), sft_row, 64)
    assert raised.value.faults[0].startswith(f"{path}, row 1: ")
