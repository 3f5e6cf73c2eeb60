"""Routers that change workers' roles, over stand-ins of agents that refuse, drain for too long, or end."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.router_stand_ins import (
    MODEL,
    ClusterStandIn,
    WorkerStandIn,
    after,
    eventually,
    hangs,
    running_cluster,
    until,
)
from support.routers.virtual_time import Clock

from cluster.config.discovery import DiscoveryConfig
from cluster.config.router import RouterConfig
from cluster.control import control_pb2 as control
from cluster.control.transport import Transport
from cluster.discovery.source import StaticList
from router.fleet import role_changes
from router.fleet.fleet import Fleet
from router.fleet.role_changes import RoleChanges
from router.fleet.worker_loads import WorkerLoads
from router.metrics import Metrics

FULL = {"running_requests": 64, "max_running_requests": 64}
ENOUGH = int(role_changes.PAUSE_S) + 10  # looks for a wish to be carried out


class Controller:
    """One router's, whose clock the test moves."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.clock, self.metrics = fleet, Clock(), Metrics()
        self.roles = RoleChanges(fleet, RouterConfig(), self.metrics, False, self.clock)

    async def look(self, times: int) -> None:
        """Look so many times, or until it has asked for a change: a test then waits for what becomes of that."""
        before = self.results()
        for _ in range(times):
            self.clock.now += 1
            await self.roles.look()
            if self.results() != before:
                return

    def results(self) -> dict[str, int]:
        (family,) = self.metrics.role_changes.collect()
        found = [each for each in family.samples if each.name.endswith("_total")]
        return {each.labels["result"]: int(each.value) for each in found}


@asynccontextmanager
async def full_decode(num_prefill: int = 2, num_decode: int = 1) -> AsyncIterator[tuple[ClusterStandIn, Controller]]:
    """Idle prefill workers, and a decode worker that runs all that it can."""
    async with running_cluster(num_prefill, num_decode, role_changes="manual") as cluster:
        await fill(cluster, cluster.decode[0])
        yield cluster, Controller(cluster.fleet)


async def fill(cluster: ClusterStandIn, worker: WorkerStandIn) -> None:
    for name, value in FULL.items():
        setattr(worker.state.load, name, value)
    await worker.change()
    await until(lambda: cluster.fleet.loads[worker.name].queues.max_running)


async def is_placeable(fleet: Fleet, worker: str, role: str) -> None:
    await until(lambda: fleet.state.workers[worker].role == role and fleet.state.workers[worker].is_placeable)


async def test_a_worker_becomes_what_is_short_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async with full_decode(3) as (cluster, controller):
        await controller.look(int(role_changes.PAUSE_S))
        assert [worker.asked_roles for worker in cluster.prefill] == [[], [], []]  # loads must show first
        with caplog.at_level(logging.INFO):
            await controller.look(1)
        asked = cluster.prefill[2].role_request
        expected = {"role": control.ROLE_DECODE, "deadline_s": RouterConfig().drain_timeout_s, "give_back_after_s": 1.0}
        assert asked == control.ChangeRoleRequest(**expected)
        why = "p2 becomes decode: prompts keep prefill workers 0 % busy, answers decode workers 100 %"
        assert controller.roles.explanation == why
        (line,) = [each for each in caplog.records if each.message == "changing role"]
        assert line.fields == {"worker": "p2", "from": "prefill", "to": "decode", "why": why}  # type: ignore[attr-defined]
        await is_placeable(cluster.fleet, "p2", "decode")
        await controller.look(ENOUGH)  # one decode worker of two is full
        assert [worker.asked_roles for worker in cluster.prefill] == [[], [], ["decode"]]
        await fill(cluster, cluster.prefill[2])
        await controller.look(ENOUGH)
        await is_placeable(cluster.fleet, "p1", "decode")
        await fill(cluster, cluster.prefill[1])
        await controller.look(3 * ENOUGH)  # the last prefill worker stays
        assert [worker.asked_roles for worker in cluster.prefill] == [[], ["decode"], ["decode"]]
        assert controller.results() == {"done": 2}


@pytest.mark.parametrize(
    ("status", "result"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "refused"),
        (grpc.StatusCode.UNIMPLEMENTED, "refused"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "timed_out"),
        (grpc.StatusCode.UNAVAILABLE, "lost"),
    ],
)
async def test_after_a_failure_another_worker_is_asked_once_the_pause_is_over(
    status: grpc.StatusCode, result: str
) -> None:
    async with full_decode() as (cluster, controller):
        p0, p1 = cluster.prefill
        p0.role_errors, p1.role_errors = [status], [status, status]
        await controller.look(ENOUGH)
        assert (p0.asked_roles, p1.asked_roles, controller.results()) == ([], ["decode"], {result: 1})
        await is_placeable(cluster.fleet, "p1", "prefill")
        await controller.look(int(role_changes.PAUSE_S) - 1)
        assert controller.results() == {result: 1}
        await controller.look(ENOUGH)
        assert (p0.asked_roles, p1.asked_roles, controller.results()) == (["decode"], ["decode"], {result: 2})
        await is_placeable(cluster.fleet, "p0", "prefill")
        await controller.look(ENOUGH)  # all have failed: the first one again
        assert (p0.asked_roles, p1.asked_roles) == (["decode"], ["decode", "decode"])
        await is_placeable(cluster.fleet, "p1", "prefill")
        await controller.look(ENOUGH)
        await is_placeable(cluster.fleet, "p0", "decode")


async def test_nothing_changes_while_a_worker_is_away_or_comes_back() -> None:
    async with full_decode(3, 2) as (cluster, controller):
        await fill(cluster, cluster.decode[1])
        p0, *_ = cluster.prefill
        await p0.change(ready=False)
        await until(lambda: not cluster.view("p0").is_ready)
        await controller.look(2 * ENOUGH)
        await p0.change(ready=True, draining=True)  # by an operator
        await until(lambda: cluster.view("p0").is_draining)
        await controller.look(2 * ENOUGH)
        await p0.change(draining=False)
        await p0.stop_agent()
        await until(lambda: cluster.view("p0").condition == "lost")
        await controller.look(2 * ENOUGH)
        await p0.restart_agent()
        await is_placeable(cluster.fleet, "p0", "prefill")
        await cluster.decode[1].change(ready=False)
        await until(lambda: not cluster.view("d1").is_ready)
        await controller.look(2 * ENOUGH)  # a decode worker comes back
        assert controller.results() == {}
        await cluster.decode[1].stop_agent()  # it does not
        await until(lambda: cluster.view("d1").condition == "lost")
        await controller.look(2)  # from now on it counts
        assert controller.results() == {}
        await controller.look(ENOUGH)
        assert controller.results() == {"done": 1}


@pytest.mark.parametrize("has_left", [False, True])  # discovery, which closes its channel
async def test_an_agent_that_ends_in_the_change_is_a_lost_worker(has_left: bool) -> None:
    async with full_decode(3) as (cluster, controller):
        p2 = cluster.prefill[2]
        p2.may_end.clear()
        looking = asyncio.create_task(controller.look(ENOUGH))
        await until(lambda: cluster.view("p2").is_draining)
        await (cluster.fleet.link("p2")._channel.aclose() if has_left else p2.stop_agent())
        await looking
        assert controller.results() == {"lost": 1}
        await controller.look(2 * ENOUGH)
        assert controller.results() == {"lost": 1}


async def test_a_worker_whose_adapters_no_store_has_keeps_its_role() -> None:
    async with full_decode() as (cluster, controller):
        await cluster.prefill[1].send_delta(in_memory_only=[f"sha256:{1:064x}"])
        await until(lambda: cluster.view("p1").residency.memory_only)
        await controller.look(ENOUGH)
        assert [worker.asked_roles for worker in cluster.prefill] == [["decode"], []]


async def test_what_waits_goes_elsewhere_however_often() -> None:
    """A prompt may wait for memory of the decode workers that are short: the prefill worker could not drain."""
    async with full_decode() as (cluster, _):
        for worker in cluster.workers:
            worker.engine.behaviours = [hangs] * 4  # more often than an attempt may fail
        waiting = asyncio.create_task(cluster.post(prompt="x", max_tokens=4))
        for _ in range(4):
            await until(lambda: any(worker.engine.num_running for worker in cluster.prefill))
            (holder,) = (worker for worker in cluster.prefill if worker.engine.num_running)
            if len(holder.engine.bodies) == 2:
                holder.engine.behaviours.clear()
            await holder.change(draining=True, gives_back=True)
            await until(lambda holder=holder: not holder.engine.num_running)
            await holder.change(draining=False, gives_back=False)
        status, *_ = await waiting
        assert status == 200
        assert sum(len(worker.engine.bodies) for worker in cluster.prefill) == 5


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_an_answer_that_has_begun_stays(is_streaming: bool) -> None:
    async with full_decode() as (cluster, _):
        (decode,) = cluster.decode
        decode.engine.event_gap_s = 0.5
        decode.engine.behaviours = [] if is_streaming else [after(1.0)]
        body = {"model": MODEL, "prompt": "x", "stream": is_streaming}
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(cluster.http.post(f"{cluster.url}/v1/completions", json=body))
            if is_streaming:
                await (await answer).content.readany()
            await until(lambda: decode.engine.num_running and not cluster.fleet.loads["p0"].prompt_tokens)
            await decode.change(draining=True, gives_back=True)
            await until(lambda: cluster.view("d0").gives_back)
        assert (await answer).status == 200
        assert await (await answer).text()
        assert len(decode.engine.bodies) == 1


async def test_two_routers_that_decide_at_once_make_one_change() -> None:
    """One router's change lets the other one wait, and its own pause is the other's."""
    async with full_decode(4) as (cluster, first):
        loads = WorkerLoads()
        workers = {each.name: (each.role, each.address) for each in cluster.workers}
        bounds = {"heartbeat_s": 2.0, "connect_timeout_s": 5.0, "transport": Transport(roles_change=True)}
        fleet = Fleet(
            [StaticList(workers)], loads, model=MODEL, **bounds, discovery=DiscoveryConfig(), on_leave=lambda _: None
        )
        async with fleet.following():
            await until(lambda: len(fleet.state.readers) == 4 and loads["d0"].queues.max_running)
            second = Controller(fleet)
            _, _, p2, p3 = cluster.prefill
            p3.may_end.clear()
            both = asyncio.gather(first.look(20), second.look(20))
            await until(lambda: len(p3.asked_roles) == 2)
            p3.may_end.set()
            await both
            assert first.results() | second.results() == {"done": 1, "refused": 1}
            for controller in (first, second):
                await is_placeable(controller.fleet, "p3", "decode")
            await fill(cluster, p3)
            await until(lambda: loads["p3"].queues.max_running)
            await asyncio.gather(first.look(5), second.look(5))
            assert [len(worker.asked_roles) for worker in cluster.prefill] == [0, 0, 0, 2]
            await first.look(ENOUGH)
            await is_placeable(fleet, "p2", "decode")
            await fill(cluster, p2)
            await until(lambda: loads["p2"].queues.max_running)
            await second.look(5)  # its pause begins with what it sees
            assert [len(worker.asked_roles) for worker in cluster.prefill] == [0, 0, 1, 2]


@pytest.mark.parametrize("mode", ["dry-run", "auto", "manual"])
async def test_by_configuration_a_router_changes_roles_or_only_says_it(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_changes, "_LOOK_S", 0.01)
    monkeypatch.setattr(role_changes, "PAUSE_S", 0.1)
    async with running_cluster(2, 1, role_changes=mode) as cluster:
        await fill(cluster, cluster.decode[0])
        if mode == "manual":
            await asyncio.sleep(0.5)
            assert (await cluster.admin("/console/state"))[1]["role_change"] == ""
            page = await cluster.metrics_page()
            assert "prelude_router_role_changes_total{" not in page
            assert "prelude_router_workers_wanted{" not in page
        else:
            why = "p1 becomes decode: prompts keep prefill workers 0 % busy, answers decode workers 100 %"
            await eventually(lambda: cluster.admin("/console/state"), lambda found: found[1]["role_change"] == why)
            result = "dry_run" if mode == "dry-run" else "done"
            series = f'prelude_router_role_changes_total{{from="prefill",result="{result}",to="decode"}}'
            page = await eventually(cluster.metrics_page, lambda page: series in page)
            if mode == "dry-run":
                wanted = {"prefill": 1, "decode": 2}
                lines = [f'prelude_router_workers_wanted{{role="{role}"}} {num}.0' for role, num in wanted.items()]
                assert all(line in page for line in lines)
        assert bool(cluster.prefill[1].asked_roles) is (mode == "auto")


@pytest.mark.parametrize(("mode", "num_queued"), [("auto", 38), ("manual", 0)])
async def test_requests_wait_where_a_worker_finds_them_that_gets_the_role(mode: Any, num_queued: int) -> None:
    async with running_cluster(1, 1, role_changes=mode) as cluster:
        may_end = asyncio.Event()

        async def wait(*_: Any) -> None:
            await may_end.wait()

        for worker in cluster.workers:
            worker.engine.behaviours = [wait] * 40

        async def found(name: str) -> float:
            page = await cluster.metrics_page()
            return sum(map(float, re.findall(rf"^prelude_router_{name} (\S+)", page, re.MULTILINE)))

        prompt = "a " * 600  # 0.06 s, as far as the router knows: one to read, and one to go on with
        calls = [asyncio.create_task(cluster.post(prompt=prompt, max_tokens=1)) for _ in range(40)]
        await until(lambda: cluster.prefill[0].engine.num_running == 40 - num_queued)
        await eventually(cluster.num_queued, lambda number: number == num_queued)
        await eventually(lambda: found("prefill_queue_seconds"), lambda seconds: seconds > 1)
        if mode == "auto":
            await eventually(lambda: found('workers_wanted{role="prefill"}'), lambda number: number == 2)
        may_end.set()
        await asyncio.gather(*calls)
        await eventually(lambda: found("prefill_queue_seconds"), lambda seconds: seconds == 0)
