"""Contexts and answers are the ids that serving reads and would have to generate."""

import copy
from datetime import datetime
from typing import Any

import pytest

from training.data.columns import preference_row, sft_row
from training.data.examples import load
from training.data.jsonl import RowFault
from training.data.tokens import Encoder
from training.errors import OptionInvalid

ASK = {"role": "user", "content": "What is the sea?"}
REPLY = {"role": "assistant", "content": "Water, mostly."}
MORE = {"role": "user", "content": "And the rest?"}
LAST = {"role": "assistant", "content": "Salt."}


def decoded(tokenizer: Any, ids: tuple[int, ...]) -> str:
    return tokenizer.decode(ids)


@pytest.mark.parametrize("completion", [" wide.", " wide.<|end|>"])
def test_a_text_ends_once(tokenizer: Any, encoder: Encoder, completion: str):
    (turn,) = encoder.turns(sft_row({"prompt": "The sea is", "completion": completion, "id": 7}))
    assert turn.context == tuple(tokenizer("The sea is")["input_ids"])
    assert decoded(tokenizer, turn.answers[0]) == " wide.<|end|>"


def test_an_answer_that_would_merge_with_the_prompt_follows_the_prompts_own_tokens(encoder: Encoder, tokenizer: Any):
    """The engine reads the prompt alone, so its ids are those of the prompt alone."""
    whole, prompt = "The library", "The lib"
    assert tuple(tokenizer(whole)["input_ids"])[: len(tokenizer(prompt)["input_ids"])] != tuple(
        tokenizer(prompt)["input_ids"]
    )
    (turn,) = encoder.turns(sft_row({"prompt": prompt, "completion": "rary"}))
    assert turn.context == tuple(tokenizer(prompt)["input_ids"])
    assert decoded(tokenizer, turn.answers[0]) == "rary<|end|>"


def test_every_turn_of_a_conversation_reads_the_answers_before_it(encoder: Encoder, tokenizer: Any):
    first, second = encoder.turns(sft_row({"messages": [ASK, REPLY, MORE, LAST]}))
    assert decoded(tokenizer, first.context) == "<|user|>What is the sea?<|end|><|assistant|>"
    assert decoded(tokenizer, first.answers[0]) == "Water, mostly.<|end|>"
    assert decoded(tokenizer, second.context) == (
        "<|user|>What is the sea?<|end|><|assistant|>Water, mostly.<|end|><|user|>And the rest?<|end|><|assistant|>"
    )
    assert decoded(tokenizer, second.answers[0]) == "Salt.<|end|>"
    assert second.context[: len(first.context)] == first.context


def test_only_the_completion_of_a_chat_is_trained(encoder: Encoder, tokenizer: Any):
    (turn,) = encoder.turns(sft_row({"prompt": [ASK, REPLY, MORE], "completion": [LAST]}))
    assert decoded(tokenizer, turn.answers[0]) == "Salt.<|end|>"


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": [ASK], "chosen": [REPLY], "rejected": [LAST]},
        {"chosen": [ASK, REPLY], "rejected": [ASK, LAST]},
    ],
)
def test_preferences(encoder: Encoder, tokenizer: Any, columns: dict[str, Any]):
    (turn,) = encoder.turns(preference_row(columns))
    assert [decoded(tokenizer, each) for each in turn.answers] == ["Water, mostly.<|end|>", "Salt.<|end|>"]
    assert decoded(tokenizer, turn.context) == "<|user|>What is the sea?<|end|><|assistant|>"


def test_tools_and_template_arguments_reach_the_template(encoder: Encoder, tokenizer: Any):
    tools = [{"type": "function", "function": {"name": "depth"}}]
    (turn,) = encoder.turns(sft_row({"prompt": [ASK], "completion": [REPLY], "tools": tools}))
    assert decoded(tokenizer, turn.context).startswith('<|system|>You may call: {"type": "function", "function": {')


def test_what_a_template_writes_behind_the_end_is_not_learned(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        tokenizer, "chat_template", tokenizer.chat_template.replace("<|end|>{% endfor", "<|end|>\n\n{% endfor")
    )
    first, second = Encoder(tokenizer).turns(sft_row({"messages": [ASK, REPLY, MORE, LAST]}))
    assert decoded(tokenizer, first.answers[0]) == "Water, mostly.<|end|>"
    assert "mostly.<|end|>\n\n" in decoded(tokenizer, second.context)


def test_a_template_that_writes_no_end_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    """Unless the model's configuration names its last token: an answer ends at the first of all of them."""
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template.replace("<|end|>", "<|user|>"))
    row = sft_row({"messages": [ASK, REPLY]})
    with pytest.raises(RowFault, match=r"Water, mostly.<\|user\|>' with no end-of-sequence token \('<\|end\|>'\)"):
        list(Encoder(tokenizer).turns(row))
    also = tokenizer.convert_tokens_to_ids("<|user|>")
    (turn,) = Encoder(tokenizer, [also]).turns(row)
    assert decoded(tokenizer, turn.answers[0]) == "Water, mostly.<|user|>"
    (turn,) = Encoder(tokenizer, [also]).turns(
        sft_row({"prompt": "The sea is", "completion": " wide.<|user|>dry<|end|>"})
    )
    assert decoded(tokenizer, turn.answers[0]) == " wide.<|user|>"


def test_an_answer_in_the_middle_of_a_word_gets_no_space():
    """By a tokenizer that puts one before every text, as Llama 2's does."""
    spaced = make_spaced_tokenizer()
    assert spaced.tokenize("rary")[0].startswith("▁")
    (turn,) = Encoder(spaced).turns(sft_row({"prompt": "The lib", "completion": "rary is"}))
    assert turn.context == tuple(spaced("The lib")["input_ids"])
    assert decoded(spaced, (*turn.context, *turn.answers[0])) == "The library is<|end|>"
    assert "▁" not in spaced.convert_ids_to_tokens(turn.answers[0])[0]


def make_spaced_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["▁The", "▁library", "▁lib", "▁is", "r", "a", "ry", "▁", "\n", "lib"]
    made = Tokenizer(models.Unigram([("<unk>", -20.0), *((each, -1.0 - len(pieces)) for each in pieces)], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


def test_templates_that_ask_for_the_time_get_the_encoders(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ strftime_now('%d %b %Y') }}" + tokenizer.chat_template)
    encoder = Encoder(tokenizer, date=datetime(2024, 7, 26))
    (turn,) = encoder.turns(sft_row({"messages": [ASK, REPLY]}))
    assert encoder.is_dated
    assert decoded(tokenizer, turn.context).startswith("26 Jul 2024<|user|>")
    assert decoded(tokenizer, turn.answers[0]) == "Water, mostly.<|end|>"


def test_a_tokenizer_without_an_end_is_refused(tokenizer: Any):
    tokenizer = copy.deepcopy(tokenizer)  # copies share their special tokens
    tokenizer.eos_token = None
    with pytest.raises(OptionInvalid, match="no eos_token"):
        Encoder(tokenizer)


def test_documents_branch_where_their_context_ends(encoder: Encoder, write_rows):
    path = write_rows({"prompt": "The sea", "chosen": " is wide.", "rejected": " is a sea."})
    (example,) = load([path], encoder, preference_row, 100).examples
    (document,) = example.documents(4)
    assert document.trunk == tuple(example.turns[0].context)
    assert [(each.position, each.example, each.is_chosen) for each in document.branches] == [
        (len(document.trunk), 4, True),
        (len(document.trunk), 4, False),
    ]


def test_blank_rows_and_a_mark_at_the_start_are_no_rows(encoder: Encoder, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "completion": "b"}\n\n   \n{"prompt": "c", "completion": "d"}')
    examples = load([path], encoder, sft_row, 100).examples
    assert [each.where for each in examples] == [f"{path}, row 1", f"{path}, row 4"]


def test_the_first_rows_alone(encoder: Encoder, write_rows):
    path = write_rows(*({"prompt": "a", "completion": "b"} for _ in range(5)), "not JSON")
    assert len(load([path], encoder, sft_row, 100, num_rows=5)) == 5
