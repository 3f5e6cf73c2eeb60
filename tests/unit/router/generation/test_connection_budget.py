"""Connections to engines: a request gets room for all of its calls, or none."""

from __future__ import annotations

import asyncio

from support.router_stand_ins import answers, eventually, hangs, running_cluster
from support.routers.router_calls import has_phase


async def test_a_router_holds_no_more_connections_than_its_room():
    async with running_cluster(1, 1, max_engine_connections=8) as cluster:
        cluster.decode[0].engine.behaviours = [hangs] * 3
        waiting = asyncio.create_task(cluster.post(prompt="Hi", n=3))
        is_under_way = has_phase("waiting_first_event")
        await eventually(lambda: cluster.admin("/debug/requests"), is_under_way)
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
