"""Batched answers are those of the float32 reference, which answers one prompt after the other."""

import math
import random
from collections import Counter

import pytest
from support.adapters.reference_answers import answer

from adapters.formats import read_adapter
from samples.random_adapters import write_random_direft, write_random_lora
from training.runs import answers as module
from training.runs.answers import Question, answers

SEED = 5


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    """Prompts of 1 to 30 tokens, with answers of 1 to 12 that are scored, in no order."""
    chosen = random.Random(SEED)
    return [
        Question(ids(chosen, chosen.randint(1, 30)), chosen.randint(1, 12), ids(chosen, chosen.randint(1, 12)))
        for _ in range(21)
    ]


def ids(chosen: random.Random, count: int) -> list[int]:
    return [chosen.randrange(100) for _ in range(count)]


@pytest.mark.parametrize("positions", ["prefill", "all"])
@pytest.mark.parametrize("kind", ["lora", "direft", None])
def test_batches_answer_as_the_reference(kind, positions, model, base, limits, questions, tmp_path, monkeypatch):
    monkeypatch.setitem(module._PROMPTS_AT_ONCE, "cpu", 8)
    adapter = None
    if kind is not None:
        write = {"lora": write_random_lora, "direft": write_random_direft}[kind]
        adapter = read_adapter(write(tmp_path / "adapter", base, seed=3, rank=4), base, limits)
    whole = [answer(model, adapter, each.context, each.num_tokens, positions).tokens for each in questions]
    [(end, _)] = Counter(token for tokens in whole for token in tokens[:-1]).most_common(1)
    expected = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in whole]
    found = dict(answers(model, adapter, questions, {end}, positions))
    assert [found[number].tokens for number in range(len(questions))] == expected
    assert expected != whole  # some answers end early
    for number, each in enumerate(questions):
        scored = answer(model, adapter, each.context, each.expected, positions)
        assert found[number].loss == pytest.approx(-math.fsum(scored.logprobs), abs=2e-4)


def test_the_longest_come_first_and_what_is_answered_comes_at_once(model, questions, monkeypatch):
    monkeypatch.setitem(module._TOKENS_AT_ONCE, "cpu", 90)
    coming = answers(model, None, questions, set())
    first, _ = next(coming)
    assert len(questions[first].context) == max(len(each.context) for each in questions)
    assert sorted([first, *(number for number, _ in coming)]) == list(range(len(questions)))
    assert list(answers(model, None, [], set())) == []
    [(_, unscored)] = answers(model, None, [Question([1, 2], 3)], set())
    assert unscored.loss == 0


@pytest.mark.parametrize(("most_prompts", "most_tokens", "sizes"), [(3, 99, [3, 3, 1]), (9, 8, [2, 2, 2, 1])])
def test_batches_are_as_large_as_they_may_be(most_prompts, most_tokens, sizes, monkeypatch):
    monkeypatch.setitem(module._PROMPTS_AT_ONCE, "cpu", most_prompts)
    monkeypatch.setitem(module._TOKENS_AT_ONCE, "cpu", most_tokens)
    assert [len(batch) for batch in module._batches([Question([1, 2], 2)] * 7, "cpu")] == sizes
