"""Evaluation through a cluster: what is asked, what counts as exact, and how it fails. A small HTTP server answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.bench.answering_server import BASE, REVISION, Answer, AnsweringServer, answering, refusal
from support.training.small_runs import sft_rows, write_jsonl

from process.free_ports import free_port
from training.data.examples import load_sft
from training.data.prompts import Prompt, prompts_of
from training.data.tokens import Encoder
from training.errors import ClusterRefused, OptionInvalid
from training.runs.base import load_tokenizer
from training.runs.evaluation import AnsweredTurn
from training.runs.served_evaluation import Cluster, ServedEvaluation, differing


@dataclass(frozen=True)
class Rows:
    tokenizer: Any
    ends: frozenset[int]
    prompts: Sequence[Prompt]

    def ask(self, cluster: Cluster, *adapters: str | None) -> list[ServedEvaluation]:
        return cluster.evaluate(self.tokenizer, self.ends, self.prompts, adapters or [None])


@pytest.fixture(scope="module")
def rows(setting: Any, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Texts and conversations: eight prompts of six rows."""
    tokenizer, ends = load_tokenizer(setting.model)
    texts = [{"prompt": f"sea and {word}", "completion": f" {word}"} for word in ("boats", "bread")]
    tools = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
    first, *others = sft_rows(4)  # the first has two turns
    path = write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", [*texts, first, *others[:2], others[2] | tools])
    loaded = load_sft([path], Encoder(tokenizer, ends), 512)
    prompts = list(prompts_of([path], loaded))
    assert len(prompts) == sum(len(example.turns) for example in loaded.examples) > len(loaded) == 6
    return Rows(tokenizer, ends, prompts)


def test_every_prompt_is_asked_as_a_client_would(rows: Rows):
    with answering(AnsweringServer(rows.prompts)) as server:
        base, adapter = rows.ask(Cluster(f"{server.url}/v1/", key="secret"), None, "acme")
    assert (base.name, adapter.name) == ("no adapter", "acme")
    assert (base.exact_match, adapter.exact_match, adapter.failed) == (1.0, 1.0, ())
    assert (base.revisions, adapter.revisions) == ((), (REVISION,))
    assert [turn.where for turn in adapter.turns] == [prompt.where for prompt in rows.prompts]
    assert all(turn.given == turn.expected for turn in adapter.turns)
    assert server.keys == {"Bearer secret"}
    assert {body.get("adapter") for body in server.asked} == {None, "acme"}
    for body in server.asked:
        assert (body["model"], body["temperature"], body["repetition_penalty"]) == (BASE, 0, 1.0)
    assert {"prompt", "messages", "tools"} <= {name for body in server.asked for name in body}


def test_an_answer_is_exact_token_for_token(rows: Rows):
    """Right words without their end are not."""

    def cut(body: dict[str, Any], right: Answer) -> Answer:
        if body.get("prompt") == rows.prompts[0].fields["prompt"]:
            right.body["choices"][0]["token_ids"].pop()
        return right

    with answering(AnsweringServer(rows.prompts, cut)) as server:
        [found] = rows.ask(Cluster(server.url))
    first, *others = found.turns
    assert (first.given, first.is_exact, first.error) == (first.expected, False, None)
    assert all(turn.is_exact for turn in others)
    assert found.exact_match == len(others) / len(found.turns)


def test_errors_are_counted_and_named_by_row(rows: Rows):
    def some_fail(body: dict[str, Any], right: Answer) -> Answer:
        match body.get("prompt"):
            case "sea and boats":
                return refusal(500, "worker_lost", "the worker died")
            case "sea and bread":
                right.body["choices"][0]["prompt_token_ids"].append(1)
        return right

    with answering(AnsweringServer(rows.prompts, some_fail)) as server:
        [found] = rows.ask(Cluster(server.url))
    one, two = found.failed
    assert (one.where, one.given, one.is_exact) == (rows.prompts[0].where, None, False)
    assert one.error == "500 worker_lost: the worker died"
    assert "is --model the directory that the cluster serves" in (two.error or "")
    assert found.exact_match == (len(rows.prompts) - 2) / len(rows.prompts)


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"<html>", "without choices"), ({"choices": []}, "without choices"), ({"choices": [{}]}, "without token_ids")],
)
def test_answers_that_are_none(rows: Rows, body: Any, reason: str):
    with answering(AnsweringServer(rows.prompts, lambda _body, _right: Answer(body))) as server:
        [found] = rows.ask(Cluster(server.url))
    assert len(found.failed) == len(rows.prompts)
    assert all(reason in (turn.error or "") for turn in found.failed)


@pytest.mark.parametrize("hold_s", [0.0, 1.0], ids=["asks to wait", "does not answer"])
def test_a_prompt_has_a_deadline(rows: Rows, hold_s: float):
    busy = refusal(503, "queue_full", retry_after="0")
    with answering(AnsweringServer(rows.prompts, lambda _body, _right: busy, hold_s=hold_s)) as server:
        [found] = rows.ask(Cluster(server.url, timeout_s=0.3))
    assert {turn.error for turn in found.failed} == {"no answer within 0.3 s"}
    assert len(found.failed) == len(rows.prompts)


def test_a_cluster_that_asks_to_wait_is_asked_again(rows: Rows):
    refused = {1: refusal(429, "rate_limit_exceeded", retry_after="0"), 2: refusal(503, "x", retry_after="0")}

    def answered(_body: dict[str, Any], right: Answer) -> Answer:
        return refused.pop(len(server.asked), right)

    with answering(AnsweringServer(rows.prompts, answered)) as server:
        [found] = rows.ask(Cluster(server.url, concurrency=1))
    assert (refused, found.exact_match) == ({}, 1.0)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_concurrency_is_bounded_and_used(rows: Rows, concurrency: int):
    together = threading.Barrier(concurrency)  # the first so many answers wait for each other

    def answered(_body: dict[str, Any], right: Answer) -> Answer:
        if 1 < len(server.asked) <= 1 + concurrency:  # the first request was alone: is the name known?
            together.wait(30)
        return right

    with answering(AnsweringServer(rows.prompts, answered)) as server:
        [found] = rows.ask(Cluster(server.url, concurrency=concurrency))
    assert (found.exact_match, server.most_at_once) == (1.0, concurrency)


def test_it_gives_up_where_nothing_succeeds(rows: Rows):
    many = Rows(rows.tokenizer, rows.ends, list(rows.prompts) * 5)
    with answering(AnsweringServer(rows.prompts, lambda _b, _r: refusal(502, "worker_lost"))) as server:
        [found] = many.ask(Cluster(server.url, concurrency=1))
    assert len(server.asked) == 1 + 20
    assert [turn.error for turn in found.failed[20:]] == ["not asked: 20 prompts in a row had failed"] * (
        len(many.prompts) - 20
    )


@pytest.mark.parametrize(
    ("answer", "adapter", "message"),
    [
        (refusal(401, "invalid_api_key"), None, r"refuses requests without a key .*invalid_api_key.*PRELUDE_API_KEY"),
        (refusal(403, "insufficient_scope"), "a", r"insufficient_scope.*PRELUDE_API_KEY"),
        (refusal(404, "model_not_found", "there is no a"), "a", r"does not serve a .*there is no a.*/v1/models has"),
        (refusal(404, "adapter_not_found", "there is no a"), "a", r"does not serve a .*adapter_not_found"),
        (refusal(410, "adapter_revision_gone"), "a", r"does not serve a .*adapter_revision_gone"),
        (refusal(404, "unknown_path"), "a", r"answers /v1/.*completions with 404 unknown_path.*is it a router"),
        (refusal(422, "unified_worker_needed"), "a", r"does not serve a .*unified_worker_needed"),
        (Answer(b"not found", 404), None, r"answers /v1/.*completions with 404 not found; is it a router of Prelude"),
    ],
)
def test_what_every_prompt_would_get_ends_it(rows: Rows, answer: Answer, adapter: str | None, message: str):
    with (
        answering(AnsweringServer(rows.prompts, lambda _body, _right: answer)) as server,
        pytest.raises(ClusterRefused, match=message),
    ):
        rows.ask(Cluster(server.url), adapter)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (Answer(b"hello"), "is no list of models; is it a router"),
        (Answer({"data": []}), "is no list of models"),
        (Answer(b"no", 404), "answers /v1/models with 404 no"),
        (refusal(503, "not_ready", "starting"), "answers /v1/models with 503 not_ready: starting"),
        (refusal(401, "invalid_api_key"), "without a key"),
    ],
)
def test_an_address_that_is_no_router(rows: Rows, models: Answer, message: str):
    with (
        answering(AnsweringServer(rows.prompts, models=models)) as server,
        pytest.raises(ClusterRefused, match=message),
    ):
        rows.ask(Cluster(server.url))


def test_nobody_there(rows: Rows):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ClusterRefused, match=rf"{url} cannot be reached .*is the router running there"):
        rows.ask(Cluster(url))


def test_options_that_cannot_be():
    with pytest.raises(OptionInvalid, match="a router's is like http://"):
        Cluster("127.0.0.1:8000")
    for wrong in ({"concurrency": 0}, {"timeout_s": 0.0}):
        with pytest.raises(OptionInvalid, match="both must be positive"):
            Cluster("http://a", **wrong)


def test_a_directory_that_is_no_model(tmp_path: Path):
    with pytest.raises(OptionInvalid, match="cannot be loaded by transformers"):
        load_tokenizer(tmp_path)


def test_different_answers_are_paired(rows: Rows):
    with answering(AnsweringServer(rows.prompts)) as server:
        [found] = rows.ask(Cluster(server.url))
    alike = [AnsweredTurn(t.where, t.expected, t.given or "", t.is_exact, 0.0, t.num_tokens) for t in found.turns]
    assert list(differing(found.turns, alike)) == []
    other = AnsweredTurn(alike[2].where, alike[2].expected, "else", False, 1.0, alike[2].num_tokens)
    assert list(differing(found.turns, [*alike[:2], other, *alike[3:]])) == [(found.turns[2], other)]
