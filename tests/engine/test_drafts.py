"""A pair whose decode engine guesses tokens with a draft model: answers are the reference's, under every adapter.

On CPUs the engines have SGLang's kernels for EAGLE from `support.engines.draft_kernels`.
"""

import asyncio
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.adapters.random_adapters import write_random_lora, write_random_reft
from support.engines.draft_kernels import write_plugin
from support.engines.parity import EMBEDDING_TOLERANCE, LOGPROB_TOLERANCE, Case, random_prompts, reference_cases
from support.engines.random_draft import write_random_draft
from support.engines.running_engine import DEVICE, EXTRA_ARGUMENTS, RunningEngine, engine_spec, running_engine

from adapters.model.base_model import BaseModel
from process.free_ports import free_port

NEW_TOKENS = 40
MOST_GUESSED_FOR = 3  # requests of a batch; larger ones make single tokens
_rooms = itertools.count(1)


@dataclass(frozen=True)
class Pair:
    prefill: RunningEngine
    decode: RunningEngine
    revisions: dict[str, str]

    def ask(self, *asked: tuple[str | None, Sequence[int], dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
        """The decode engine's answers to (adapter, prompt, sampling parameters), sent together."""
        return asyncio.run(self._ask(asked, fields))

    async def _ask(self, asked, fields) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=120) as client:

            async def one(adapter, prompt, sampling) -> dict[str, Any]:
                body = self.body(prompt, sampling, **fields)
                named = body if adapter is None else {**body, "lora_path": self.revisions[adapter]}
                sent = ((self.prefill, named), (self.decode, body))
                _, answer = await asyncio.gather(*(client.post(f"{e.spec.url}/generate", json=b) for e, b in sent))
                return answer.json()

            return await asyncio.gather(*(one(*each) for each in asked))

    def body(self, prompt, sampling, **fields) -> dict[str, Any]:
        return {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, **sampling},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.spec.bootstrap_port,
            "bootstrap_room": next(_rooms),
            **fields,
        }


@pytest.fixture(scope="module")
def directories(tmp_path_factory, model: Path) -> dict[str, Path]:
    base, root = BaseModel.read(model), tmp_path_factory.mktemp("adapters")
    return {"lora": write_random_lora(root / "lora", base, 1), "direft": write_random_reft(root / "direft", base, 4)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory, model: Path, directories: dict[str, Path]):
    root = tmp_path_factory.mktemp("draft")
    draft = write_random_draft(model, root / "draft")
    steps = root / "steps.json"
    steps.write_text(json.dumps({"1": {"candidate_steps": [3]}, MOST_GUESSED_FOR + 1: {"candidate_steps": [0]}}))
    arguments = (
        *("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(draft)),
        *("--speculative-eagle-topk", "1", "--speculative-adaptive", "--speculative-adaptive-config", str(steps)),
    )
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("PYTHONPATH", f"{write_plugin(root / 'plugin')}:{os.environ.get('PYTHONPATH', '')}")
        cache = tmp_path_factory.mktemp("cache")
        common = {"extra_arguments": (*EXTRA_ARGUMENTS, *arguments), "kv_page_tokens": 16}
        prefill_spec = engine_spec("prefill", model, root / "p", bootstrap_port=free_port(), **common)
        decode_spec = engine_spec("decode", model, root / "d", adapters=None, max_total_tokens=1024, **common)
        with running_engine(prefill_spec, cache) as prefill, running_engine(decode_spec, cache) as decode:
            yield Pair(prefill, decode, {name: prefill.load(directory) for name, directory in directories.items()})


@pytest.fixture(scope="module")
def cases(tmp_path_factory, model: Path, directories: dict[str, Path]) -> list[Case]:
    """Prompts of less and of more than a chunk, under each adapter and none."""
    asked = [(name, ids) for ids in random_prompts(7, 5, 20, 150) for name in (None, *directories)]
    return reference_cases(model, tmp_path_factory.mktemp("reference"), directories, asked, NEW_TOKENS)


def steps_of(answers: list[dict[str, Any]]) -> tuple[int, int]:
    """Steps of the decode engine, and the tokens that they made."""
    metas = [answer["meta_info"] for answer in answers]
    return sum(meta["spec_verify_ct"] for meta in metas), sum(meta["completion_tokens"] - 1 for meta in metas)


def check(case: Case, answer: dict[str, Any]) -> None:
    assert answer["output_ids"] == case.reference["tokens"][: len(answer["output_ids"])], case.name
    found = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
    for mine, theirs in zip(found, case.reference["logprobs"], strict=False):
        assert abs(mine - theirs) <= LOGPROB_TOLERANCE, case.name


def test_alone_each_answer_is_the_references_in_fewer_steps(pair: Pair, cases: list[Case]):
    answers = [pair.ask((case.adapter, case.prompt_ids, {}), return_logprob=True)[0] for case in cases]
    for case, answer in zip(cases, answers, strict=True):
        assert len(answer["output_ids"]) == NEW_TOKENS
        check(case, answer)
    steps, tokens = steps_of(answers)
    assert steps < tokens, "no guess was right"


def test_together_too_and_large_batches_make_single_tokens(pair: Pair, cases: list[Case]):
    """As answers end, a batch becomes small enough to be guessed for."""
    asked = [(case.adapter, case.prompt_ids, {"max_new_tokens": 8 + 4 * n}) for n, case in enumerate(cases)]
    answers = pair.ask(*asked, return_logprob=True)
    for case, (_, _, fields), answer in zip(cases, asked, answers, strict=True):
        assert len(answer["output_ids"]) == min(fields["max_new_tokens"], NEW_TOKENS)
        check(case, answer)
    equal = pair.ask(*((case.adapter, case.prompt_ids, {}) for case in cases[: MOST_GUESSED_FOR + 1]))
    assert len(equal) > MOST_GUESSED_FOR


def test_answers_stay_right_when_kv_is_retracted(
    pair: Pair, cases: list[Case], tmp_path: Path, model: Path, directories
):
    asked = [(name, ids) for ids in random_prompts(9, 30, 40) for name in (None, *directories)]
    long = reference_cases(model, tmp_path, directories, asked, 250)
    answers = pair.ask(*((case.adapter, case.prompt_ids, {"max_new_tokens": 250}) for case in long))
    assert any(answer["meta_info"].get("num_retractions") for answer in answers), "nothing was retracted"
    for case, answer in zip(long, answers, strict=True):
        assert answer["output_ids"] == case.reference["tokens"], case.name


def test_a_grammar_holds(pair: Pair, cases: list[Case]):
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]})
    asked = [(case.adapter, case.prompt_ids, {"json_schema": schema, "ignore_eos": False}) for case in cases[:3]]
    for answer in pair.ask(*asked):
        assert json.loads(answer["text"])["a"] in ("x", "y")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("frequency_penalty", 0.5, "frequency_penalty"),
        ("presence_penalty", -0.5, "presence_penalty"),
        ("repetition_penalty", 1.2, "repetition_penalty"),
        ("min_new_tokens", 3, "min_tokens"),
        ("min_p", 0.1, "min_p"),
    ],
)
def test_what_needs_single_tokens_is_refused_by_name(
    pair: Pair, cases: list[Case], field: str, value: float, named: str
):
    case = cases[1]
    refused, answer = pair.ask((case.adapter, case.prompt_ids, {field: value}), (case.adapter, case.prompt_ids, {}))
    assert refused["error"]["message"].startswith(f"{named} cannot be used where a draft model guesses"), refused
    assert answer["output_ids"] == case.reference["tokens"]


def test_an_abandoned_request_leaves_the_others_alone(pair: Pair, cases: list[Case]):
    case = cases[4]

    async def abandon() -> None:
        body = pair.body(case.prompt_ids, {"max_new_tokens": 1500}, stream=True)
        async with httpx.AsyncClient(timeout=60) as client:
            reading = asyncio.create_task(
                client.post(f"{pair.prefill.spec.url}/generate", json={**body, "stream": False})
            )
            async with client.stream("POST", f"{pair.decode.spec.url}/generate", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line:
                        break
            await reading

    asyncio.run(abandon())
    [answer] = pair.ask((case.adapter, case.prompt_ids, {}))
    assert answer["output_ids"] == case.reference["tokens"]


def test_embeddings_are_the_references(pair: Pair, cases: list[Case]):
    async def ask() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=60) as client:
            bodies = [
                pair.body(case.prompt_ids, {"max_new_tokens": 1}, return_hidden_states="last", bootstrap_host="2.2.2.2")
                | ({} if case.adapter is None else {"lora_path": pair.revisions[case.adapter]})
                for case in cases
            ]
            return await asyncio.gather(
                *(client.post(f"{pair.prefill.spec.url}/generate", json=body) for body in bodies)
            )

    for case, answer in zip(cases, asyncio.run(ask()), strict=True):
        state = answer.json()["meta_info"]["hidden_states"]
        length = sum(number * number for number in state) ** 0.5
        wanted = case.reference["embedding"]
        assert max(abs(a / length - b) for a, b in zip(state, wanted, strict=True)) <= EMBEDDING_TOLERANCE, case.name
