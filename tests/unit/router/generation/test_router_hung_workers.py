"""A worker whose agent says that its engine hangs: what waits there goes elsewhere at once, what runs there goes on."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from support.router_stand_ins import EngineStandIn, WorkerStandIn, hangs, running_cluster, until

WITHIN_S = 30.0  # on a machine that stalls; 60 to 300 s would pass without


async def hung(worker: WorkerStandIn) -> None:
    await worker.change(hung=True, ready=False, reason="the engine's scheduler-0 has shown no progress for 10 s")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_before_the_first_event_of_a_pair(role: str):
    async with running_cluster(2, 2) as cluster:
        workers = cluster.prefill_by_affinity if role == "prefill" else cluster.decode
        for worker in cluster.decode:
            worker.engine.behaviours = [hangs]
        if role == "prefill":
            workers[0].engine.behaviours = [hangs]
        asking = asyncio.create_task(cluster.post(prompt="Hi", adapter="a0"))
        await until(lambda: any(each.engine.bodies for each in cluster.decode))
        await until(lambda: any(each.engine.bodies for each in cluster.prefill))
        victim = next(worker for worker in workers if worker.engine.bodies)
        for worker in cluster.decode:
            worker.engine.behaviours = []
        await hung(victim)
        assert (await asyncio.wait_for(asking, WITHIN_S))[0] == 200
        assert len(victim.engine.bodies) == 1


async def test_while_it_is_asked_for_the_prompt_s_text():
    async with running_cluster(0, 0, 2) as cluster:
        _, other = cluster.unified  # the first one has read the prompt
        other.engine.hangs_at_texts = True
        asking = asyncio.create_task(cluster.post(prompt=[1, 2], echo=True, max_tokens=0))
        await until(lambda: other.engine.num_texts)
        await hung(other)
        status, answer, _ = await asyncio.wait_for(asking, WITHIN_S)
        assert (status, answer["choices"][0]["text"]) == (200, "w1 w2")
        assert not any(load.num_sequences for load in cluster.fleet.loads.values())


async def test_while_the_adapter_is_loaded():
    async with running_cluster(0, 0, 2) as cluster:
        first, second = cluster.unified
        first.ensure_delay_s = 60.0
        asking = asyncio.create_task(cluster.post(prompt="Hi", adapter="a0"))
        await until(lambda: first.ensured)
        await hung(first)
        assert (await asyncio.wait_for(asking, WITHIN_S))[0] == 200
        assert (len(first.engine.bodies), len(second.engine.bodies)) == (0, 1)


async def test_a_running_stream_goes_on_and_new_requests_go_elsewhere():
    async with running_cluster(0, 0, 2) as cluster:
        first, second = cluster.unified
        resume = asyncio.Event()

        async def pauses(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            begin, *rest = engine.events(fields)
            await response.write(begin)
            await resume.wait()
            await response.write(b"".join(rest) + b"data: [DONE]\n\n")
            return response

        first.engine.behaviours = [pauses]
        streaming = asyncio.create_task(cluster.stream(prompt="Hi", adapter="a0"))
        await cluster.has_phase("relaying")
        await hung(first)
        await until(lambda: cluster.view("u0").is_hung)
        assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
        assert len(second.engine.bodies) == 1
        assert not streaming.done()
        await first.change(hung=False, ready=True, reason="")
        resume.set()
        assert (await asyncio.wait_for(streaming, WITHIN_S))[-1] == b"[DONE]"
