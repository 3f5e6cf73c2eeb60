"""Connections to engines: a request gets room for all of its calls, or none.

A router without descriptors says so; its workers are not blamed, and serve as soon as it has some again.
"""

import asyncio

import pytest
from support.descriptors import no_descriptors
from support.router_stand_ins import answers, eventually, hangs, running_cluster


async def test_a_router_holds_no_more_connections_than_its_room():
    async with running_cluster(1, 1, max_engine_connections=8) as cluster:
        cluster.decode[0].engine.behaviours = [hangs] * 3
        waiting = asyncio.create_task(cluster.post(prompt="Hi", n=3))
        await cluster.has_phase("waiting_first_event")
        await eventually(lambda: asyncio.sleep(0, len(cluster.decode[0].engine.bodies)), lambda seen: seen == 3)
        status, answer, headers = await cluster.post(prompt="Hi", n=2)
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "router_exhausted", "1")
        assert len(cluster.decode[0].engine.bodies) == 3  # no engine has heard of it
        assert (await cluster.post(prompt="Hi"))[0] == 200
        waiting.cancel()
        await eventually(lambda: cluster.post(prompt="Hi", n=3), lambda answer: answer[0] == 200)
        for _ in range(5):  # whatever fails gives its room back
            cluster.decode[0].engine.behaviours = [answers(400)]
            assert (await cluster.post(prompt="Hi", n=3))[0] == 400
        status, answer, headers = await cluster.post(prompt="Hi", n=5)
        assert (status, answer["error"]["code"]) == (503, "router_exhausted")
        assert "retry-after" not in headers
        page = await cluster.metrics_page()
        assert 'prelude_router_exhausted_total{reason="connections"} ' in page


@pytest.mark.parametrize("shape", [(1, 2), (0, 0, 2)])
async def test_a_router_without_descriptors_blames_nobody(shape: tuple[int, ...]) -> None:
    async with running_cluster(*shape) as cluster:
        assert (await cluster.get("/health"))[0] == 200  # the client's connection is open from here on
        with no_descriptors():
            for _ in range(6):  # three in a row would open a breaker
                status, answer, headers = await cluster.post(prompt="Hi")
                assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "router_exhausted", "1")
                assert "Too many open files" in answer["error"]["message"]
        assert not any(cluster.fleet.breaker(worker.name).is_blocking for worker in cluster.workers)
        assert (await cluster.post(prompt="Hi"))[0] == 200
        page = await cluster.metrics_page()
        assert "prelude_router_retries_total{" not in page
        (exhausted,) = [line for line in page.splitlines() if line.startswith("prelude_router_exhausted_total{")]
        assert 'reason="emfile"' in exhausted
