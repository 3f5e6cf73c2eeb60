"""Retries: a failed attempt is followed by another one while a worker can take it, or is expected back."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.router_stand_ins import ClusterStandIn, WorkerStandIn, answers, drops, running_cluster, until

from router.http import engine_connections
from router.placement.placer import Placer


async def loses_contact(cluster: ClusterStandIn, worker: WorkerStandIn) -> None:
    await worker.stop_agent()
    await until(lambda: not cluster.view(worker.name).is_connected)


async def error_of(cluster: ClusterStandIn, adapter: str = "a0") -> tuple[int, str, float]:
    """Status and code of a request that fails, and the seconds until then."""
    began_at = time.monotonic()
    status, answer, _ = await cluster.post(prompt="Hi", adapter=adapter)
    return status, answer["error"]["code"], time.monotonic() - began_at


class TestAConnectionThatIsLate:
    """The engine may be well: this process was not scheduled until the deadline was over."""

    @pytest.fixture
    def late(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        """Has the next connection to each of these engines be too late."""
        address_of, ports = engine_connections._address, set[int]()

        def address(url: str) -> tuple[bool, str, int]:
            found = address_of(url)
            if found[2] in ports:
                ports.remove(found[2])
                raise TimeoutError
            return found

        def late(*workers: WorkerStandIn) -> None:
            ports.update(int(worker.engine.url.rpartition(":")[2]) for worker in workers)

        monkeypatch.setattr(engine_connections, "_address", address)
        return late

    @pytest.mark.parametrize(("failure", "stream"), [(drops, False), (answers(500), True)])
    async def test_is_tried_again(self, stream: bool, failure: Any, late: Callable[..., None]) -> None:
        async with running_cluster(0, 0, 2) as cluster:
            first, second = cluster.unified
            late(second)
            first.engine.behaviours = [failure]
            if stream:
                assert (await cluster.stream(prompt="Hi", adapter="a0"))[-1] == b"[DONE]"
            else:
                assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
            assert len(second.ensured) > len(second.engine.bodies) == 1

    async def test_after_another_placement_and_not_for_ever(self, late: Callable[..., None]) -> None:
        async with running_cluster(0, 0, 2, max_attempts=2) as cluster:
            late(*cluster.unified)
            assert (await error_of(cluster))[:2] == (502, "worker_lost")
            late(cluster.unified[0])
            assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
            assert cluster.num_bodies == [0, 1]


class TestAWorkerThatIsLate:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("shape", "nums_asked"), [((0, 0, 2), [1, 1]), ((1, 2), [2, 1, 1])], ids=["unified", "pair"]
    )
    async def test_is_waited_for(self, shape: tuple[int, ...], nums_asked: list[int], stream: bool) -> None:
        async with running_cluster(*shape) as cluster:
            first, second = cluster.unified or cluster.decode
            first.engine.behaviours = [drops]
            await loses_contact(cluster, second)
            ask = cluster.stream if stream else cluster.post
            asking = asyncio.create_task(ask(prompt="Hi", adapter="a0"))
            await until(lambda: len(first.engine.bodies))
            await cluster.has_phase("admitted")
            await asyncio.sleep(0.1)
            assert not asking.done()
            await second.restart_agent()
            answer = await asyncio.wait_for(asking, 120)
            assert answer[-1] == b"[DONE]" if stream else answer[0] == 200
            assert cluster.num_bodies == nums_asked

    async def test_is_no_reason_to_place_whoever_waits_at_each_change(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hundreds may wait for one of many workers: the event loop would stand still."""
        async with running_cluster(0, 0, 2) as cluster:
            first, second = cluster.unified
            first.engine.behaviours = [drops]
            await loses_contact(cluster, second)
            asking = asyncio.create_task(cluster.post(prompt="Hi", adapter="a0"))
            await until(lambda: len(first.engine.bodies))
            await cluster.has_phase("admitted")
            place, placed = Placer.place, list[Any]()
            monkeypatch.setattr(Placer, "place", lambda *arguments: placed.append(arguments) or place(*arguments))
            for is_draining in (True, False, True):
                await first.change(draining=is_draining)
                await until(lambda expected=is_draining: cluster.view("u0").is_draining is expected)
            await asyncio.sleep(0)
            assert not placed
            await second.restart_agent()
            assert (await asking)[0] == 200

    async def test_may_come_back_as_another_engine(self) -> None:
        async with running_cluster(0, 0, 2) as cluster:
            first, second = cluster.unified
            first.engine.behaviours = [drops]
            await loses_contact(cluster, second)
            asking = asyncio.create_task(error_of(cluster))
            await until(lambda: len(first.engine.bodies))
            await second.change(ready=False, incarnation="u1-2", reason="its engine is not warm yet")
            await second.restart_agent()
            assert (await asyncio.wait_for(asking, 120))[:2] == (502, "worker_lost")
            assert cluster.num_bodies == [1, 0]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("config", "at_least_s"),
        [({"heartbeat_s": 0.2}, 0.0), ({"heartbeat_s": 60.0, "first_event_timeout_s": 0.4}, 0.4)],
    )
    async def test_is_not_waited_for_longer_than_its_grace_and_the_deadline(
        self, config: dict[str, float], at_least_s: float
    ) -> None:
        """The grace is three heartbeats since contact was lost."""
        async with running_cluster(0, 0, 2, **config) as cluster:
            cluster.unified[0].engine.behaviours = [drops]
            await loses_contact(cluster, cluster.unified[1])
            status, code, seconds = await error_of(cluster)
            assert (status, code) == (502, "worker_lost")
            assert at_least_s < seconds < 10


async def loses_its_engine(cluster: ClusterStandIn, worker: WorkerStandIn) -> None:
    await worker.crash_engine()
    await until(lambda: not cluster.view(worker.name).is_placeable)


async def loses_contact_while_it_drains(cluster: ClusterStandIn, worker: WorkerStandIn) -> None:
    await worker.change(draining=True)
    await until(lambda: cluster.view(worker.name).is_draining)
    await loses_contact(cluster, worker)


class TestAWorkerThatIsNotExpectedBack:
    """The grace of a late worker would be three minutes here."""

    @staticmethod
    async def check(cluster: ClusterStandIn, adapter: str) -> None:
        cluster.unified[0].engine.behaviours = [drops]
        status, code, seconds = await error_of(cluster, adapter)
        assert (status, code) == (502, "worker_lost")
        assert seconds < 10

    @pytest.mark.parametrize(
        ("shape", "adapter", "goes"),
        [
            ((0, 0, 2), "a0", loses_its_engine),
            ((0, 0, 2), "a0", loses_contact_while_it_drains),
            ((1, 1, 1), "everywhere", loses_contact),  # of a pair, which could not serve the request
        ],
    )
    async def test_is_not_waited_for(self, shape: tuple[int, ...], adapter: str, goes: Any) -> None:
        async with running_cluster(*shape, heartbeat_s=60.0) as cluster:
            (other,) = cluster.decode or cluster.unified[1:]
            await goes(cluster, other)
            await self.check(cluster, adapter)

    async def test_it_is_the_one_that_failed(self) -> None:
        async with running_cluster(0, 0, 1, heartbeat_s=60.0) as cluster:
            (worker,) = cluster.unified
            asking = asyncio.create_task(self.check(cluster, "a0"))
            worker.ensure_delay_s = 30.0
            await until(lambda: worker.ensured)
            await loses_contact(cluster, worker)
            await asyncio.wait_for(asking, 120)
