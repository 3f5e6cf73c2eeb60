"""What a request leaves behind: nothing that waits for the garbage collector, which would stop every stream."""

from __future__ import annotations

import asyncio
import gc

import pytest
from support.router_stand_ins import MODEL, ClusterStandIn, running_cluster


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"adapter": "a0"}, {"n": 2}])
async def test_a_request_leaves_no_circles(fields: dict[str, object]) -> None:
    async def ask(cluster: ClusterStandIn) -> None:
        body = {"model": MODEL, "prompt": "Hi", **fields}
        async with cluster.http.post(f"{cluster.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.read()
            await answer.read()
        await asyncio.sleep(0)  # the endpoint's task ends

    async with running_cluster() as cluster:
        await ask(cluster)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                await ask(cluster)
            gc.collect()
            found = {type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("router.")}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert found == set()
