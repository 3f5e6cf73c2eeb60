"""The fleet as the router sees it: waiting for changes."""

from __future__ import annotations

import asyncio

import pytest
from support.router_stand_ins import ClusterStandIn, until

from router.errors import WorkerLost
from router.management.worker_calls import on_each

REVISION = f"sha256:{1:064x}"


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
