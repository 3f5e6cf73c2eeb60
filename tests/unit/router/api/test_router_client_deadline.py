"""The client's deadline: the answer is an error, and the work at the engines ends."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from support.router_stand_ins import MODEL, ClusterStandIn, eventually, hangs, running_cluster, stops_after


async def ask(cluster: ClusterStandIn, given: str, **fields: Any) -> tuple[int, bytes]:
    body = {"model": MODEL, "prompt": "Hi", "adapter": "a0", **fields}
    headers = {"x-prelude-timeout": given}
    async with cluster.http.post(f"{cluster.url}/v1/completions", json=body, headers=headers) as answer:
        return answer.status, await answer.read()


async def has_ended(cluster: ClusterStandIn) -> None:
    """Nothing is left at any engine that was asked."""
    for worker in cluster.workers:
        engine = worker.engine
        for request in engine.requests:
            await eventually(lambda: asyncio.sleep(0, engine.aborted), lambda seen: request["rid"] in seen)  # noqa: B023
        await eventually(lambda: asyncio.sleep(0, engine.num_running), lambda number: number == 0)  # noqa: B023


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_event(stream: bool):
    async with running_cluster() as cluster:
        for worker in cluster.workers:
            worker.engine.behaviours = [hangs]
        began_at = time.monotonic()
        status, body = await ask(cluster, "0.5", stream=stream)
        assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_exceeded")
        assert "0.5 s, the request's x-prelude-timeout" in json.loads(body)["error"]["message"]
        assert 0.5 <= time.monotonic() - began_at < 30
        await has_ended(cluster)


async def test_in_the_middle_of_a_stream():
    async with running_cluster(0, 0, 1) as cluster:
        cluster.unified[0].engine.behaviours = [stops_after(2)]
        status, body = await ask(cluster, "0.7", stream=True)
        events = body.strip().split(b"\n\n")
        assert status == 200
        assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "deadline_exceeded"
        await has_ended(cluster)


async def test_while_an_adapter_is_loaded():
    async with running_cluster(0, 0, 1) as cluster:
        cluster.unified[0].ensure_delay_s = 30.0
        status, body = await ask(cluster, "0.5")
        assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_exceeded")
        assert cluster.unified[0].engine.bodies == []


async def test_one_that_suffices_changes_nothing():
    async with running_cluster() as cluster:
        assert (await ask(cluster, "60"))[0] == 200
        status, body = await ask(cluster, "60", stream=True)
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n")


async def test_what_is_no_number_of_seconds_is_refused():
    async with running_cluster() as cluster:
        for given in ("0", "-1", "nan", "inf", "1e9", "soon", "1" * 400):
            status, body = await ask(cluster, given)
            assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_field")
            assert "x-prelude-timeout must be a number of seconds" in json.loads(body)["error"]["message"]
