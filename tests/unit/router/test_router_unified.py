"""The router before unified workers, alone and beside pairs, against stand-ins of engines and agents."""

import asyncio

import pytest
from support.router_stand_ins import (
    EVERYWHERE_ID,
    MESSAGES,
    MODEL,
    REVISION_ID,
    WORDS,
    ClusterStandIn,
    after,
    running_cluster,
    until,
)

from cluster.control import control_pb2 as control


class TestOneEngineCall:
    @pytest.mark.slow
    @pytest.mark.parametrize("stream", [False, True])
    async def test_with_an_adapter(self, stream: bool) -> None:
        fields = {"model": MODEL, "messages": MESSAGES, "temperature": 0.5}
        fields |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        async with running_cluster(0, 0, 1) as cluster:
            url = f"{cluster.url}/v1/chat/completions"
            async with cluster.http.post(url, json={**fields, "adapter": "a0"}) as response:
                assert (response.status, response.headers["x-prelude-revision"]) == (200, REVISION_ID)
                answer = await response.text()
            assert all(word in answer for word in (*WORDS, '"completion_tokens":3'))
            assert answer.endswith("data: [DONE]\n\n") is stream

            (worker,) = cluster.unified
            assert worker.ensured == [REVISION_ID]
            (sent,) = worker.engine.requests
            assert sent.pop("rid").startswith("chatcmpl-")
            assert sent == {**fields, "lora_path": REVISION_ID, "extra_key": "default|"}
            await cluster.is_idle()
            assert worker.engine.aborted == []

    async def test_speed_of_reading_is_learnt_from_answers_that_are_not_streamed(self) -> None:
        async with running_cluster(0, 0, 1) as cluster:
            (worker,) = cluster.unified
            load = cluster.fleet.loads[worker.name]

            async def reports(**counts: int) -> None:
                worker.state.load.MergeFrom(control.Load(**counts))
                await worker.change()
                await until(lambda: load.max_kv_tokens == counts["max_kv_tokens"])

            before = load.tokens_per_s
            worker.engine.behaviours = [after(0.3)]  # longer than its prompt is expected to take
            await reports(max_kv_tokens=1, read_tokens=1, reading_us=1)
            await asyncio.sleep(0.3)
            await reports(max_kv_tokens=2, read_tokens=3, reading_us=200_001)
            assert load.tokens_per_s == before  # its engine may find nearly all prompts in its cache
            assert (await cluster.post(prompt="Hi"))[0] == 200
            assert load.tokens_per_s < before / 1.5  # 0.7 s for 7 tokens


class TestPlacing:
    async def test_an_adapter_that_acts_everywhere_goes_to_unified_workers_only(self) -> None:
        async with running_cluster(1, 1, 1) as cluster:
            statuses = await asyncio.gather(*(cluster.post(prompt="Hi", adapter="everywhere") for _ in range(4)))
            assert [status for status, _, _ in statuses] == [200] * 4
            assert cluster.num_bodies == [0, 0, 4]
            assert {request["lora_path"] for request in cluster.unified[0].engine.requests} == {EVERYWHERE_ID}
            assert cluster.prefill[0].ensured == []
            assert "everywhere" in await _models(cluster)

    async def test_without_a_unified_worker_it_can_never_be_served(self, cluster: ClusterStandIn) -> None:
        status, answer, headers = await cluster.post(prompt="Hi", adapter="everywhere")
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (422, "unified_worker_needed", "adapter")
        assert "'everywhere' acts on 'all' positions, which only a unified worker can serve" in error["message"]
        assert "retry-after" not in headers
        assert cluster.num_bodies == [0, 0]
        assert "everywhere" not in await _models(cluster)
        assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200

    async def test_with_one_that_is_not_ready_it_may_be_served_later(self) -> None:
        async with running_cluster(1, 1, 1) as cluster:
            await cluster.unified[0].change(ready=False, reason="its engine is not warm yet")
            await until(lambda: not cluster.view("u0").is_ready)
            status, answer, headers = await cluster.post(prompt="Hi", adapter="everywhere")
            assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "no_worker_available", "1")
            assert "no unified worker" in answer["error"]["message"]


async def _models(cluster: ClusterStandIn) -> set[str]:
    return {model["id"] for model in (await cluster.get("/v1/models"))[1]["data"]}
