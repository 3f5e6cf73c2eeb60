"""Answers through the whole cluster are those of transformers and peft with the adapter on the prompt only."""

from __future__ import annotations

import asyncio
import itertools
import random

import httpx
import pytest
from support.clusters.running_cluster import CHUNK_TOKENS, RunningCluster
from support.engines.parity import (
    NEW_TOKENS,
    Case,
    check_adapters_matter,
    check_embedding,
    check_logprobs,
    check_tokens,
    completion_body,
)
from support.engines.reference_answers import run_reference

ADAPTERS = (None, "a0", "a1", "a2", "a3", "reft", "loreft", "mixed", "zero")
LORA = ("a0", "a1", "a2", "a3", "zero")


def prompts(tokenizer) -> dict[str, tuple[int, ...]]:
    """Prompts of every shape that prefill treats differently."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text)["input_ids"])

    story = ids("The morning was quiet and the harbour was full of boats. " * 40)
    return {
        "one token": ids("sea")[:1],
        "two words": ids("Hello world"),
        "a sentence": ids("Please tell me about the sea, the rivers and the lighthouses."),
        "one chunk exactly": story[:CHUNK_TOKENS],
        "one chunk and one token": story[: CHUNK_TOKENS + 1],
        "several chunks": story[5 : 5 + 3 * CHUNK_TOKENS + 17],
        "unicode": ids("Grüße, 世界! Привет 🌊🚢 — naïve café"),
        "shared prefix, first": story[: CHUNK_TOKENS // 2] + ids(" Somebody opened a window."),
        "shared prefix, second": story[: CHUNK_TOKENS // 2] + ids(" Nobody counted the lamps."),
    }


@pytest.fixture(scope="session")
def cases(cluster: RunningCluster, tmp_path_factory) -> list[Case]:
    """Every prompt under every adapter, with the reference's answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cluster.model_dir)
    asked = [(adapter, *prompt) for adapter, prompt in itertools.product(ADAPTERS, prompts(tokenizer).items())]
    answers = run_reference(
        cluster.model_dir,
        [
            {
                "adapter": cluster.adapters[adapter] if adapter else None,
                "prompt_ids": ids,
                "max_new_tokens": NEW_TOKENS,
                "positions": "prefill",
            }
            for adapter, _, ids in asked
        ],
        tmp_path_factory.mktemp("reference"),
    )
    return [Case(adapter, name, ids, answer) for (adapter, name, ids), answer in zip(asked, answers, strict=True)]


@pytest.fixture(scope="session")
def client(cluster: RunningCluster):
    with httpx.Client(base_url=cluster.url, timeout=120) as client:
        yield client


def ask(client: httpx.Client, case: Case, **fields) -> dict:
    answer = client.post("/v1/completions", json=completion_body(case.adapter, case.prompt_ids, **fields))
    assert answer.status_code == 200, f"{case.name}: {answer.text}"
    return answer.json()


def test_reference_was_independent(cases: list[Case]):
    """peft itself computed the LoRA answers, and the adapters do change them."""
    assert {case.reference["method"] for case in cases if case.adapter in LORA} == {"peft"}
    base = {case.prompt: case.reference["tokens"] for case in cases if case.adapter is None}
    for adapter in set(ADAPTERS) - {None, "zero"}:
        changed = [case for case in cases if case.adapter == adapter and case.reference["tokens"] != base[case.prompt]]
        assert len(changed) > len(base) / 2, f"{adapter} hardly changes anything: the comparison would prove little"


def test_alone(client: httpx.Client, cases: list[Case]):
    """One request at a time: greedy tokens equal, log-probabilities of prompt and answer within 1e-4."""
    worst = 0.0
    for case in cases:
        answer = ask(client, case, echo=True, logprobs=1)
        check_tokens(case, answer)
        worst = max(worst, check_logprobs(case, answer))
    print(f"{len(cases)} requests, largest difference of a log-probability {worst:.2e}")


@pytest.mark.parametrize("num_logprobs", [0, 1])
def test_prompts_alone(client: httpx.Client, cases: list[Case], num_logprobs: int):
    """`max_tokens` 0: the prompt's log-probabilities under the adapter, without a decode worker."""
    for case in cases:
        answer = ask(client, case, echo=True, logprobs=num_logprobs, max_tokens=0)
        check_logprobs(case, answer, of_prompt_only=True)
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["choices"][0]["token_ids"] == []
        assert len(answer["choices"][0]["logprobs"]["top_logprobs"]) == (len(case.prompt_ids) if num_logprobs else 0)


def test_embeddings(client: httpx.Client, cases: list[Case]):
    """/v1/embeddings: the last hidden state of a prompt under its adapter, without a decode worker."""
    worst = max(check_embedding(case, lambda body: client.post("/v1/embeddings", json=body)) for case in cases)
    print(f"{len(cases)} requests, largest difference of a number {worst:.2e}")


def test_another_adapter_would_show(cases: list[Case]):
    """Vectors and log-probabilities under a wrong adapter, or none, are far outside the tolerances above."""
    check_adapters_matter(cases)


def test_sixteen_mixed_at_once(cluster: RunningCluster, cases: list[Case]):
    """All cases, sixteen in flight at a time, neighbours under different adapters."""
    by_adapter = [[case for case in cases if case.adapter == adapter] for adapter in ADAPTERS]
    mixed = [case for group in zip(*by_adapter, strict=True) for case in group]

    async def run() -> None:
        gate = asyncio.Semaphore(16)
        limits = httpx.Limits(max_connections=16)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120, limits=limits) as client:

            async def one(case: Case) -> None:
                async with gate:
                    body = completion_body(case.adapter, case.prompt_ids, echo=True, logprobs=1)
                    answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, f"{case.name}: {answer.text}"
                check_tokens(case, answer.json())
                check_logprobs(case, answer.json())

            async with asyncio.TaskGroup() as group:
                for case in mixed:
                    group.create_task(one(case))

    asyncio.run(run())


@pytest.mark.parametrize("num_tokens", [1, 5, CHUNK_TOKENS, 3 * CHUNK_TOKENS + 17])
def test_zero_adapter_equals_base_exactly(client: httpx.Client, num_tokens: int):
    """B = 0 leaves every bit of the answer as it is without adapter.

    The prompts are new to every cache: KV that was computed earlier beside other requests differs in its last bits
    from KV computed alone, with and without adapters.
    """
    generator = random.Random(num_tokens)
    prompt = tuple(generator.randrange(10, 600) for _ in range(num_tokens))
    zero, base = (
        ask(client, Case(adapter, "new", prompt, {}), echo=True, logprobs=5)["choices"][0] for adapter in ("zero", None)
    )
    assert zero["logprobs"] == base["logprobs"]
    assert zero["token_ids"] == base["token_ids"]


ORDERS = list(itertools.permutations(("a0", "a3", None)))


@pytest.fixture(scope="session")
def cold_cases(cluster: RunningCluster, tmp_path_factory) -> dict[tuple, list[Case]]:
    """For each order a prompt of its own, which no cache has seen."""
    generator = random.Random(20)
    asked = [
        (order, adapter, tuple(generator.randrange(10, 600) for _ in range(2 * CHUNK_TOKENS + 9)))
        for order in ORDERS
        for adapter in order
    ]
    of_order = {order: ids for order, _, ids in asked}
    requests = [
        {
            "adapter": cluster.adapters[adapter] if adapter else None,
            "prompt_ids": of_order[order],
            "max_new_tokens": NEW_TOKENS,
            "positions": "prefill",
        }
        for order, adapter, _ in asked
    ]
    answers = run_reference(cluster.model_dir, requests, tmp_path_factory.mktemp("cold"))
    cases: dict[tuple, list[Case]] = {}
    for (order, adapter, _), answer in zip(asked, answers, strict=True):
        cases.setdefault(order, []).append(Case(adapter, f"cold {order}", of_order[order], answer))
    return cases


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_prefix_cache_never_crosses_adapters(client: httpx.Client, cold_cases, order):
    """The same prompt under A, B and the base in every order: each first answer is its own and finds nothing cached,
    each second one finds its own KV and is the same."""
    for case in cold_cases[order]:
        answer = ask(client, case)
        check_tokens(case, answer)
        # A first token or two may be those of another prompt of the same adapter, by chance.
        assert cached_tokens(answer) < 8, f"{case.name} under {case.adapter} found KV of another adapter"
    for case in cold_cases[order]:
        answer = ask(client, case)
        check_tokens(case, answer)
        assert cached_tokens(answer) > CHUNK_TOKENS


def cached_tokens(answer: dict) -> int:
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)


def test_follow_up_turn_adapts_the_earlier_answer(client: httpx.Client, cluster: RunningCluster, cases, tmp_path):
    """In the next turn the earlier answer is prompt, hence adapted: KV that decode wrote for it is not reused."""
    first = next(case for case in cases if case.adapter == "a0" and case.prompt == "a sentence")
    grown = (*first.prompt_ids, *first.reference["tokens"], *first.prompt_ids[:5])
    [answer] = run_reference(
        cluster.model_dir,
        [{"adapter": cluster.adapters["a0"], "prompt_ids": grown, "max_new_tokens": NEW_TOKENS}],
        tmp_path,
    )
    follow_up = Case("a0", "follow-up", grown, answer)
    check_tokens(first, ask(client, first))
    answered = ask(client, follow_up, echo=True, logprobs=1)
    check_tokens(follow_up, answered)
    check_logprobs(follow_up, answered)
    # Once more without log-probabilities, for which SGLang passes the prefix cache by.
    answered = ask(client, Case("a0", "follow-up", grown, answer))
    check_tokens(follow_up, answered)
