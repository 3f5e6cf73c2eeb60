"""What this router sees itself: workers that answer nothing and report no progress, connections that break."""

import asyncio

import pytest
from support.router_stand_ins import (
    ClusterStandIn,
    WorkerStandIn,
    answers,
    drops,
    eventually,
    hangs,
    running_cluster,
    until,
)

from router.fleet import lost_workers

WITHIN_S = 30.0  # on a machine that stalls


async def waits_at(cluster: ClusterStandIn, worker: WorkerStandIn) -> asyncio.Task:
    """A request that waits there."""
    asking = asyncio.create_task(cluster.post(prompt="Hi", adapter="a0"))
    await until(lambda: worker.engine.bodies)
    return asking


@pytest.mark.slow
async def test_without_progress_of_both_workers_of_a_pair_two_others_are_tried():
    async with running_cluster(2, 2, progress_timeout_s=2.0) as cluster:
        prefill, decode = cluster.prefill_by_affinity[0], cluster.decode[0]
        prefill.engine.behaviours, decode.engine.behaviours = [hangs], [hangs]
        assert (await asyncio.wait_for(await waits_at(cluster, prefill), WITHIN_S))[0] == 200
        assert cluster.num_bodies == [1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_progress_of_either_worker_is_progress(role: str):
    """A prompt may wait long for others, and so does the decode worker for its KV."""
    async with running_cluster(1, 1, progress_timeout_s=1.5) as cluster:
        (prefill,), (decode,) = cluster.prefill, cluster.decode
        prefill.engine.behaviours, decode.engine.behaviours = [hangs], [hangs]
        asking = await waits_at(cluster, prefill)
        working = prefill if role == "prefill" else decode
        for number in range(25):  # 2.5 s
            await working.change(progress=number + 1)
            await asyncio.sleep(0.1)
            assert not asking.done()
        answer = await asyncio.wait_for(asking, WITHIN_S)  # there is no other pair
        assert (answer[0], answer[1]["error"]["code"]) == (504, "worker_stalled")


@pytest.mark.slow
async def test_without_contact_nothing_is_known():
    async with running_cluster(1, 1, progress_timeout_s=1.0, heartbeat_s=0.1) as cluster:
        (prefill,), (decode,) = cluster.prefill, cluster.decode
        decode.engine.behaviours = [hangs]
        asking = await waits_at(cluster, decode)
        await until(lambda: prefill.engine.bodies)
        await decode.stop_agent()
        await asyncio.sleep(2.0)
        assert not asking.done()  # decode may be generating
        decode.engine.abort_events.popitem()[1].set()
        await asyncio.wait_for(asking, WITHIN_S)


async def break_connections(cluster: ClusterStandIn) -> None:
    """As many requests as it takes lose their connection to the first worker. The second one is there afterwards."""
    first, second = cluster.unified
    await set_draining(cluster, second, True)  # else placement may prefer it
    first.engine.behaviours = [drops] * 3
    for _ in range(3):
        assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 502
    await set_draining(cluster, second, False)


async def set_draining(cluster: ClusterStandIn, worker: WorkerStandIn, is_draining: bool) -> None:
    await worker.change(draining=is_draining)
    await until(lambda: cluster.view(worker.name).is_draining == is_draining)


async def test_a_worker_whose_connections_break_is_blocked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lost_workers, "_FIRST_REST_S", 600.0)  # not over before the test has looked
    async with running_cluster(0, 0, 2) as cluster:
        first, second = cluster.unified
        await break_connections(cluster)
        page = (await cluster.admin("/ready"))[1]["workers"]
        assert (page["u0"]["ready"], page["u1"]["ready"]) == (False, True)
        assert "tries it again within seconds" in page["u0"]["reason"]
        for _ in range(3):
            assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
        assert (len(first.engine.bodies), len(second.engine.bodies)) == (3, 3)


async def test_a_blocked_worker_is_probed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lost_workers, "_FIRST_REST_S", 0.01)
    async with running_cluster(0, 0, 2) as cluster:
        first, second = cluster.unified
        await break_connections(cluster)
        await eventually(lambda: cluster.admin("/ready"), lambda answer: answer[1]["workers"]["u0"]["ready"])
        await set_draining(cluster, second, True)
        assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200  # the probe
        assert len(first.engine.bodies) == 4
        assert (await cluster.admin("/ready"))[1]["workers"]["u0"]["ready"]


async def test_a_worker_whose_kv_transfers_fail_is_blocked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lost_workers, "_FIRST_REST_S", 600.0)
    monkeypatch.setattr(lost_workers, "_APART_S", 0.0)
    async with running_cluster(2, 2) as cluster:
        first, second = cluster.decode
        message = "Decode transfer failed for request x request.bootstrap_room=1: y"
        first.engine.behaviours = [answers(500, {"object": "error", "message": message, "code": 500})] * 9
        for _ in range(5):  # each is tried elsewhere
            assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
        assert (len(first.engine.bodies), len(second.engine.bodies)) == (3, 5)
        workers = (await cluster.admin("/ready"))[1]["workers"]
        assert (workers[first.name]["ready"], workers[second.name]["ready"]) == (False, True)


async def test_failures_that_a_client_can_cause_block_nobody():
    async with running_cluster(0, 0, 1) as cluster:
        cluster.unified[0].engine.behaviours = [answers(500)] * 5
        for _ in range(5):
            assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 502
        assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
