"""`/v1/score`: what a request may say, the prompts it makes, and the scores."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from support.calls import Calls

from router.errors import BrokenAnswer, InvalidField, RefusedField, RequestError
from router.protocol.field_values import Limits
from router.protocol.prefill_only.scoring import Labels
from router.protocol.validation import Endpoint, validate

LIMITS = Limits(max_choices=4, vocabulary=100)
GOOD = {"model": "base", "query": "Is it? ", "items": ["yes", "no"], "label_token_ids": [5, 7]}


def admit(**fields: Any) -> Any:
    return validate(Endpoint.SCORE, json.dumps({**GOOD, **fields}).encode(), LIMITS)


def prompts(**fields: Any) -> list[Any]:
    return [
        json.loads(bytes(each.fields.get("text") or each.fields["input_ids"])) for each in admit(**fields).sequences()
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["Is it? yes", "Is it? no"]),
        ({"item_first": True}, ["yesIs it? ", "noIs it? "]),
        ({"items": "yes"}, ["Is it? yes"]),
        ({"query": "", "items": ["caf\u00e9"]}, ["caf\u00e9"]),
        ({"items": [""]}, ["Is it? "]),
        ({"query": [1, 2], "items": [[3], []]}, [[1, 2, 3], [1, 2]]),
        ({"query": [1, 2], "items": [[3]], "item_first": True}, [[3, 1, 2]]),
        ({"query": [], "items": [[0]]}, [[0]]),
    ],
)
def test_prompts(fields: dict[str, Any], expected: list[Any]) -> None:
    assert prompts(**fields) == expected


def test_engines_get_our_fields_only() -> None:
    first, _ = admit(user="me", apply_softmax=True, item_first=None).sequences()
    assert {name: json.loads(bytes(value)) for name, value in first.fields.items()} == {
        "text": "Is it? yes",
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": -1,
        "token_ids_logprob": [5, 7],
        "stream": False,
    }
    assert not admit().generates


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"query": None}, "query"),
        ({"query": 5}, "query"),
        ({"query": ["a"]}, "query"),
        ({"query": [100], "items": [[1]]}, "query"),
        ({"items": None}, "items"),
        ({"items": []}, "items"),
        ({"items": [[1]]}, "items"),
        ({"items": ["a", 1]}, "items"),
        ({"items": ["a"] * 5}, "items"),
        ({"query": [1], "items": ["a"]}, "items"),
        ({"query": [1], "items": [1, 2]}, "items"),
        ({"query": [1], "items": [[-1]]}, "items"),
        ({"query": "", "items": ["a", ""]}, "items"),
        ({"query": [], "items": [[]]}, "items"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [100]}, "label_token_ids"),
        ({"label_token_ids": [1.5]}, "label_token_ids"),
        ({"label_token_ids": [1] * 1001}, "label_token_ids"),
        ({"apply_softmax": "yes"}, "apply_softmax"),
        ({"item_first": 1}, "item_first"),
        ({"return_pooled_hidden_states": True}, "return_pooled_hidden_states"),
        ({"session_params": {}}, "session_params"),
        ({"stream": True}, "stream"),
        ({"sampling_params": {"max_new_tokens": 9}}, "sampling_params"),
    ],
)
def test_wrong(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as wrong:
        admit(**fields)
    assert isinstance(wrong.value, InvalidField | RefusedField)
    assert wrong.value.param == param
    assert param in str(wrong.value)


def generated(*logprobs: tuple[float | None, int], prompt_tokens: int = 3) -> bytes:
    found = [[logprob, token_id, None] for logprob, token_id in logprobs]
    meta_info = {"id": "r", "prompt_tokens": prompt_tokens, "output_token_ids_logprobs": [found] if found else []}
    return json.dumps({"text": "x", "output_ids": [1], "meta_info": meta_info}).encode()


def test_probabilities() -> None:
    answers = [generated((-1.0, 5), (-2.0, 7)), generated((-3.0, 7), (None, 5), prompt_tokens=4)]
    answer = json.loads(Labels((5, 7, 5), False).merge(answers, answer_id="score-1", model="base"))
    expected = [[math.exp(-1), math.exp(-2), math.exp(-1)], [0.0, math.exp(-3), 0.0]]
    assert [pytest.approx(each) for each in expected] == answer["scores"]
    assert (answer["id"], answer["object"], answer["model"]) == ("score-1", "scoring", "base")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (7, 7)


def test_softmax_is_over_the_labels() -> None:
    answers = [generated((-1000.0, 5), (-1000.0 - math.log(3), 7)), generated((None, 5), (None, 7))]
    answer = json.loads(Labels((5, 7), True).merge(answers, answer_id="score-1", model="base"))
    assert answer["scores"] == [pytest.approx([0.75, 0.25]), [0.5, 0.5]]


def test_most_labels_of_most_items_do_not_hold_up_the_event_loop() -> None:
    ids = range(1000)
    answers = [generated(*((-1.0 - n / 1000, n) for n in ids))] * 128
    labels = Labels(tuple(ids), True)
    with Calls(builtins=True) as calls:
        merged = labels.merge(answers, answer_id="score-1", model="base")
    assert sum(json.loads(merged)["scores"][127]) == pytest.approx(1)
    assert calls.number < 4 * len(ids) * len(answers)  # a few for each label: none adds all of them up


@pytest.mark.parametrize("answer", [generated(), b'{"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}'])
def test_an_answer_without_log_probabilities_is_broken(answer: bytes) -> None:
    labels, whole = Labels((5,), False), generated((-1.0, 5))
    assert labels.parse(whole, "p0") == whole
    with pytest.raises(BrokenAnswer, match="p0"):
        labels.parse(answer, "p0")
