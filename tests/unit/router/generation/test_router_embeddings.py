"""`/v1/embeddings` through the router: one worker reads each input, under the adapter."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from support.router_stand_ins import REVISION_ID, EngineStandIn, answers, drops, running_cluster

from router.generation.engine_bodies import NOBODY

NUM_PROMPT_TOKENS = 7  # of the stand-in's usage
VECTOR = [0.6, 0.0, -0.8]  # its hidden states, scaled to length 1


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 0), (1, 0, 0), (0, 0, 1)], ids=["pair", "prefill", "unified"])
def test_embeddings(shape: tuple[int, int, int]) -> None:
    async def scenario() -> None:
        async with running_cluster(*shape) as cluster:
            status, answer, headers = await cluster.post("/v1/embeddings", adapter="a0", input=["one", "two"])
            assert status == 200, answer
            assert headers["x-prelude-revision"] == REVISION_ID
            assert [each["embedding"] for each in answer["data"]] == [pytest.approx(VECTOR)] * 2
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

    asyncio.run(scenario())


def test_each_input_gets_its_own_vector_whichever_is_answered_first() -> None:
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

    async def scenario() -> None:
        async with running_cluster() as cluster:
            cluster.prefill[0].engine.behaviours = [by_text] * 2
            _, answer, _ = await cluster.post("/v1/embeddings", input=["one", "two"])
            assert [each["embedding"] for each in answer["data"]] == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]

    asyncio.run(scenario())


@pytest.mark.parametrize("failure", ["dropped", "aborted"])
def test_another_worker_reads_the_input_if_one_fails(failure: str) -> None:
    async def scenario() -> None:
        async with running_cluster(2, 0) as cluster:
            aborted = {"text": "", "meta_info": {"prompt_tokens": 7, "finish_reason": {"type": "abort"}}}
            cluster.prefill[0].engine.behaviours = [drops if failure == "dropped" else answers(200, aborted)]
            status, answer, _ = await cluster.post("/v1/embeddings", input=[5, 6])
            assert (status, len(answer["data"])) == (200, 1)
            assert [len(worker.engine.bodies) for worker in cluster.prefill] == [1, 1]

    asyncio.run(scenario())


def test_a_decode_worker_alone_reads_no_prompts() -> None:
    async def scenario() -> None:
        async with running_cluster(0, 1) as cluster:
            status, answer, _ = await cluster.post("/v1/embeddings", input="Hi")
            assert (status, answer["error"]["code"]) == (503, "no_worker_available")

    asyncio.run(scenario())
