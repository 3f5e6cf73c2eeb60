"""Offsets of tokens in the text of a completion, as OpenAI's legacy completions have them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.completion_logprobs import text_offsets, with_text_offsets


@given(st.lists(st.text(min_size=1, max_size=5)))
def test_tokens_that_make_up_the_text(tokens: list[str]) -> None:
    text, lengths = "".join(tokens), [len(token) for token in tokens]
    assert text_offsets(tokens, text) == [sum(lengths[:i]) for i in range(len(tokens))]


@pytest.mark.parametrize(
    ("tokens", "text", "offsets"),
    [
        (["<s>", "Hi", " you", "</s>"], "Hi you", [0, 0, 2, 6]),  # special tokens
        (["The", "sea", "", "  ", "1"], "The sea    1", [0, 4, 7, 7, 11]),  # of SentencePiece: spaces are not in them
        (["a", "\ufffd", "\ufffd", "\ufffd", "b", "c"], "a\U0001f600bc", [0, 1, 1, 1, 2, 3]),  # parts of a character
        (["\ufffd", "\ufffd"] * 300 + ["x", "y"], "\u4e2d" * 300 + "xy", [0] * 600 + [300, 301]),
        (["a", "\ufffd"], "a\ufffd", [0, 1]),  # which the text has
        (["a", " stop", " here"], "a", [0, 1, 1]),  # cut off
        (["<|im_end|>"] * 3 + ["a"], "a", [0, 0, 0, 0]),
        (["\u00e9", "t", "\u00e9"], "e\u0301te\u0301", [0, 2, 3]),  # a tokenizer that normalizes
        ([], "", []),
        (["x"], "", [0]),
    ],
)
def test_tokens_that_differ_from_the_text(tokens: list[str], text: str, offsets: list[int]) -> None:
    assert text_offsets(tokens, text) == offsets


@given(st.lists(st.sampled_from(["a", "b", "ab", "\ufffd", ""])), st.text("ab\U0001f600"))
def test_offsets_never_decrease_and_are_in_the_text(tokens: list[str], text: str) -> None:
    offsets = text_offsets(tokens, text)
    assert len(offsets) == len(tokens)
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)


def test_an_answer() -> None:
    logprobs = {"text_offset": [-1, -1], "tokens": ["<s>", "caf\u00e9"], "top_logprobs": [None, {"caf\u00e9": -0.5}]}
    answer = {"id": "x", "choices": [{"index": 0, "text": "caf\u00e9", "logprobs": logprobs}], "usage": {"n": 1}}
    found = json.loads(with_text_offsets(json.dumps(answer).encode()))
    assert found["choices"][0].pop("logprobs") == {**logprobs, "text_offset": [0, 0]}
    del answer["choices"][0]["logprobs"]
    assert found == answer
    without = b'{"id":"x","choices":[{"text":"a","logprobs":null}]}'
    assert with_text_offsets(without) == without
