"""The fleet as the router sees it: waiting for changes."""

import asyncio

import pytest
from support.router_stand_ins import ClusterStandIn, running_cluster, until

from router.errors import WorkerLost
from router.management.worker_calls import on_each

REVISION = f"sha256:{1:064x}"


async def test_who_waits_looks_again_after_each_change_but_not_after_heartbeats(cluster: ClusterStandIn) -> None:
    (worker,), fleet = cluster.prefill, cluster.fleet
    looks: list[tuple[str, ...]] = []
    waiting = asyncio.create_task(
        fleet.wait_until(lambda: bool(looks.append(fleet.workers_with(REVISION)) or looks[-1]), 30)
    )
    worker.state.load.used_kv_tokens = 3
    await worker.change()
    await until(lambda: fleet.state.loads["p0"].reported_kv_tokens == 3)
    await asyncio.sleep(0)
    assert looks == [()]
    await worker.make_resident(REVISION)
    assert await waiting
    assert looks == [(), ("p0",)]
    assert not await fleet.wait_until(lambda: False, 0)


async def test_no_worker_has_no_link(cluster: ClusterStandIn) -> None:
    with pytest.raises(WorkerLost, match="no worker p9"):
        cluster.fleet.link("p9")


async def test_a_call_that_a_new_connection_cuts_has_failed(cluster: ClusterStandIn) -> None:
    """As when the certificates were replaced: its channel is closed for a new one."""
    link = cluster.fleet.link("p0")

    class Stub:
        async def EvictAdapter(self, *_, **__):
            raise asyncio.CancelledError

        async def EnsureAdapter(self, *_, **__):
            await asyncio.sleep(60)

    link._stub = Stub()  # type: ignore[assignment]
    outcomes = await on_each(["p0"], lambda _name: link.evict_adapter(REVISION, False, 5))
    assert outcomes.all_failed
    assert isinstance(outcomes.errors["p0"], WorkerLost)
    asking = asyncio.create_task(link.ensure_adapter(REVISION, 5, tenant="acme"))
    await asyncio.sleep(0.05)
    asking.cancel()  # by who asked
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_an_agent_may_come_back_in_another_domain(cluster: ClusterStandIn) -> None:
    assert cluster.view("p0").domain == ""
    cluster.prefill[0].domain = "rack-1"
    await cluster.prefill[0].restart_agent()
    await until(lambda: cluster.view("p0").domain == "rack-1")


async def test_a_worker_of_another_role_is_another_worker() -> None:
    """Nothing that was known of it is carried over, and it is chosen in its new role only."""
    async with running_cluster(role_changes="manual") as cluster:
        worker, load, breaker = cluster.prefill[0], cluster.fleet.loads["p0"], cluster.fleet.breaker("p0")
        worker.role = "decode"
        await worker.restart_agent()
        await until(lambda: cluster.view("p0").role == "decode" and cluster.view("p0").is_placeable)
        assert cluster.fleet.loads["p0"] is not load
        assert cluster.fleet.breaker("p0") is not breaker
        assert [view.name for view in cluster.fleet.state.decodes] == ["d0", "p0"]
        assert "p0" not in [view.name for view in cluster.fleet.state.readers]


async def test_a_worker_that_may_not_change_its_role_is_not_used_in_another(cluster: ClusterStandIn) -> None:
    cluster.prefill[0].role = "decode"
    await cluster.prefill[0].restart_agent()
    await until(lambda: "its role is decode, where prefill workers are" in cluster.view("p0").why_not_placeable)
    assert [view.name for view in cluster.fleet.state.decodes] == ["d0"]
