"""Prompts that are only read, by one worker: `echo` with `logprobs`, `max_tokens` 0 and embeddings."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from support.router_stand_ins import REVISION_ID, ClusterStandIn, EngineStandIn, answers, running_cluster

from cluster.config.workers import NOBODY

PROMPT = "The sea"
NUM_PROMPT_TOKENS = 7  # of the stand-in's usage


@pytest.mark.parametrize("num_logprobs", [0, 5])
@pytest.mark.parametrize("shape", [(1, 1, 0), (0, 0, 1)], ids=["pair", "unified"])
async def test_prompt_logprobs(shape: tuple[int, int, int], num_logprobs: int) -> None:
    async with running_cluster(*shape) as cluster:
        status, answer, _ = await cluster.post(prompt=PROMPT, echo=True, logprobs=num_logprobs)
        assert status == 200, answer
        lengths = {name: len(values) for name, values in answer["choices"][0]["logprobs"].items()}
        assert lengths == {"tokens": 10, "token_logprobs": 10, "top_logprobs": 10 if num_logprobs else 0}
        asked = [worker.engine.requests[0]["logprobs"] for worker in cluster.workers]
        assert asked == [max(1, num_logprobs)] * len(asked)


@pytest.mark.parametrize("num_logprobs", [None, 0, 1])
@pytest.mark.parametrize("shape", [(1, 1, 0), (0, 0, 1)], ids=["pair", "unified"])
async def test_a_prompt_alone_is_read_by_one_worker(shape: tuple[int, int, int], num_logprobs: int | None) -> None:
    async with running_cluster(*shape) as cluster:
        (worker,) = cluster.prefill or cluster.unified
        fields = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "adapter": "a0", "return_token_ids": True}
        if num_logprobs is not None:
            fields["logprobs"] = num_logprobs
        status, answer, headers = await cluster.post(**fields)
        assert status == 200, answer
        assert headers["x-prelude-revision"] == REVISION_ID
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (PROMPT, "length", [])
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] == NUM_PROMPT_TOKENS
        if num_logprobs is None:
            assert choice["logprobs"] is None
        else:
            lengths = {name: len(values) for name, values in choice["logprobs"].items()}
            expected = dict.fromkeys(("tokens", "token_logprobs"), NUM_PROMPT_TOKENS)
            assert lengths == expected | {"top_logprobs": NUM_PROMPT_TOKENS if num_logprobs else 0}

        (sent,) = worker.engine.requests
        assert (sent["max_tokens"], sent["lora_path"], sent["extra_key"]) == (1, REVISION_ID, "default|")
        assert sent.get("bootstrap_host") == (NOBODY if worker.role == "prefill" else None)
        assert [decode.engine.bodies for decode in cluster.decode] == [[]] * shape[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "text"), [([5, 6], "w5 w6"), ([0, 0], "w0 w0"), ([[5, 6]], "w5 w6"), ('caf\u00e9 "x"', 'caf\u00e9 "x"')]
)
async def test_the_prompt_is_echoed_as_text(prompt: Any, text: str, cluster: ClusterStandIn) -> None:
    _, answer, _ = await cluster.post(prompt=prompt, max_tokens=0, echo=True)
    assert answer["choices"][0]["text"] == text
    _, answer, _ = await cluster.post(prompt=prompt, max_tokens=0)
    assert answer["choices"][0]["text"] == ""


async def test_several_prompts(cluster: ClusterStandIn) -> None:
    status, answer, _ = await cluster.post(prompt=["a", "b"], max_tokens=0, echo=True, n=2)
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == ["a", "a", "b", "b"]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == 2 * NUM_PROMPT_TOKENS


async def test_each_input_gets_its_own_vector_whichever_is_answered_first(cluster: ClusterStandIn) -> None:
    two_is_answered = asyncio.Event()

    async def by_text(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> web.Response:
        if fields["text"] == "one":
            await two_is_answered.wait()
        else:
            two_is_answered.set()
        answer = engine.answer(fields)
        states = [1.0, 0.0, 0.0] if fields["text"] == "one" else [0.0, 1.0, 0.0]
        answer["meta_info"] = {**answer["meta_info"], "hidden_states": states}
        return web.json_response(answer)

    cluster.prefill[0].engine.behaviours = [by_text] * 2
    _, answer, _ = await cluster.post("/v1/embeddings", input=["one", "two"])
    assert [each["embedding"] for each in answer["data"]] == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


async def test_a_vector_that_an_engine_gave_up_is_asked_elsewhere() -> None:
    async with running_cluster(2, 0) as cluster:
        aborted = {"text": "", "meta_info": {"prompt_tokens": 7, "finish_reason": {"type": "abort"}}}
        cluster.prefill[0].engine.behaviours = [answers(200, aborted)]
        status, answer, _ = await cluster.post("/v1/embeddings", input=[5, 6])
        assert (status, len(answer["data"])) == (200, 1)
        assert [len(worker.engine.bodies) for worker in cluster.prefill] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 0), (0, 0, 1)], ids=["pair", "unified"])
async def test_embeddings(shape: tuple[int, int, int]) -> None:
    async with running_cluster(*shape) as cluster:
        status, answer, headers = await cluster.post("/v1/embeddings", adapter="a0", input=["one", "two"])
        assert status == 200, answer
        assert headers["x-prelude-revision"] == REVISION_ID
        assert [each["embedding"] for each in answer["data"]] == [pytest.approx([0.6, 0.0, -0.8])] * 2
        assert [each["index"] for each in answer["data"]] == [0, 1]
        assert answer["usage"]["total_tokens"] == 2 * NUM_PROMPT_TOKENS
        assert (answer["model"], answer["object"], answer["id"][:5]) == ("base", "list", "embd-")
        assert REVISION_ID[7:19] in answer["system_fingerprint"]
        (worker,) = cluster.prefill or cluster.unified
        assert sorted(sent["text"] for sent in worker.engine.requests) == ["one", "two"]  # sent at once
        for sent in worker.engine.requests:
            assert (sent["lora_path"], sent["extra_key"]) == (REVISION_ID, "default|")
            assert sent["return_hidden_states"] == "last"
            assert sent.get("bootstrap_host") == (NOBODY if worker.role == "prefill" else None)
        assert [decode.engine.bodies for decode in cluster.decode] == [[]] * shape[1]
        _, named, _ = await cluster.post("/v1/embeddings", model="a0", input=["one", "two"])
        assert (named["model"], named["data"]) == ("a0", answer["data"])
        metrics = await cluster.metrics_page()
        assert 'prelude_router_requests_total{endpoint="embeddings",status="200"} 2.0' in metrics
