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
    stops_after,
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

    @pytest.mark.parametrize(("event_gap_s", "bodies"), [(1e-6, [1, 1, 5]), (1000.0, [0, 0, 6])])
    async def test_the_objective_decides_whether_a_worker_that_generates_reads_a_prompt(
        self, event_gap_s: float, bodies: list[int]
    ) -> None:
        """It is for the unified worker, which has it in its prefix cache, unless its streams may not wait."""
        prompt = " ".join(map(str, range(2000)))
        async with running_cluster(1, 1, 1, slo={"first_token_s": 1.0, "event_gap_s": event_gap_s}) as cluster:
            (prefill,), (unified,) = cluster.prefill, cluster.unified
            await prefill.change(ready=False)
            await until(lambda: not cluster.view("p0").is_ready)
            await cluster.post(prompt=prompt)
            unified.engine.behaviours = [stops_after(2)] * 4
            streams = [asyncio.create_task(cluster.stream(prompt=f"{number}")) for number in range(4)]
            await until(lambda: unified.engine.num_running == 4)
            await cluster.has_phase("relaying")
            await prefill.change(ready=True)
            await until(lambda: cluster.view("p0").is_ready)
            assert (await cluster.post(prompt=prompt))[0] == 200
            assert cluster.num_bodies == bodies
            for each in streams:
                each.cancel()


async def _models(cluster: ClusterStandIn) -> set[str]:
    return {model["id"] for model in (await cluster.get("/v1/models"))[1]["data"]}
