"""Answers through the whole cluster are those of transformers and peft with the adapter on the prompt only."""

import itertools
from pathlib import Path

import httpx
import pytest
from support.clusters.running_cluster import CHUNK_TOKENS, RunningCluster
from support.engines.parity import (
    Case,
    check_adapters_matter,
    check_embedding,
    check_logprobs,
    check_scales,
    check_together,
    check_tokens,
    completion_body,
    random_prompts,
    reference_cases,
)

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
    asked = itertools.product(ADAPTERS, prompts(tokenizer).values())
    return reference_cases(cluster.model_dir, tmp_path_factory.mktemp("reference"), cluster.adapters, asked)


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
    base = {case.prompt_ids: case.reference["tokens"] for case in cases if case.adapter is None}
    for adapter in set(ADAPTERS) - {None, "zero"}:
        own = [case for case in cases if case.adapter == adapter]
        changed = [case for case in own if case.reference["tokens"] != base[case.prompt_ids]]
        assert len(changed) > len(base) / 2, f"{adapter} hardly changes anything: the comparison would prove little"


def test_alone(cluster: RunningCluster, cases: list[Case]):
    """One request at a time: greedy tokens equal, log-probabilities of prompt and answer within 1e-4."""
    worst = check_together(cluster.url, cases, 1, echo=True, logprobs=1)
    print(f"{len(cases)} requests, largest difference of a log-probability {worst:.2e}")


@pytest.mark.parametrize("num_logprobs", [0, 1])
def test_prompts_alone(client: httpx.Client, cases: list[Case], num_logprobs: int):
    """`max_tokens` 0: the prompt's log-probabilities under the adapter, without a decode worker."""
    for case in cases if num_logprobs else cases[::4]:
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
    check_together(cluster.url, mixed, 16, echo=True, logprobs=1)


@pytest.mark.parametrize("num_tokens", [1, 5, CHUNK_TOKENS, 3 * CHUNK_TOKENS + 17])
def test_zero_adapter_equals_base_exactly(client: httpx.Client, num_tokens: int):
    """B = 0 leaves every bit of the answer as it is without adapter.

    The prompts are new to every cache: KV that was computed earlier beside other requests differs in its last bits
    from KV computed alone, with and without adapters.
    """
    [prompt] = random_prompts(num_tokens, num_tokens)
    zero, base = (
        ask(client, Case(adapter, "new", prompt, {}), echo=True, logprobs=5)["choices"][0] for adapter in ("zero", None)
    )
    assert zero["logprobs"] == base["logprobs"]
    assert zero["token_ids"] == base["token_ids"]


ORDERS = list(itertools.permutations(("a0", "a3", None)))


@pytest.fixture(scope="session")
def cold_cases(cluster: RunningCluster, tmp_path_factory) -> dict[tuple, list[Case]]:
    """For each order a prompt of its own, which no cache has seen."""
    prompts = random_prompts(20, *[2 * CHUNK_TOKENS + 9] * len(ORDERS))
    asked = [(adapter, ids) for order, ids in zip(ORDERS, prompts, strict=True) for adapter in order]
    cases = reference_cases(cluster.model_dir, tmp_path_factory.mktemp("cold"), cluster.adapters, asked)
    return {order: cases[3 * number : 3 * number + 3] for number, order in enumerate(ORDERS)}


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


def test_scales(cluster: RunningCluster, adapters: dict[str, Path], tmp_path: Path):
    scaled = {name: adapters[name] for name in ("a0", "a2", "a3", "reft", "loreft", "mixed")}
    check_scales(cluster.url, cluster.model_dir, tmp_path, scaled, 2 * CHUNK_TOKENS + 21)


def test_follow_up_turn_adapts_the_earlier_answer(client: httpx.Client, cluster: RunningCluster, cases, tmp_path):
    """In the next turn the earlier answer is prompt, hence adapted: KV that decode wrote for it is not reused."""
    first = next(case for case in cases if case.adapter == "a0" and 8 < len(case.prompt_ids) < CHUNK_TOKENS)
    grown = (*first.prompt_ids, *first.reference["tokens"], *first.prompt_ids[:5])
    [follow_up] = reference_cases(cluster.model_dir, tmp_path, cluster.adapters, [("a0", grown)])
    check_tokens(first, ask(client, first))
    check_together(cluster.url, [follow_up], echo=True, logprobs=1)
    # Once more without log-probabilities, for which SGLang passes the prefix cache by.
    check_tokens(follow_up, ask(client, follow_up))
