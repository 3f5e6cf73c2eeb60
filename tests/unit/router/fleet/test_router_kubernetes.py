"""Workers that a running router finds by Kubernetes: a scripted fleet under load, with the official client."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.router_stand_ins import EngineStandIn, WorkerStandIn, eventually
from support.routers.finding_router import FoundByKubernetes, kubernetes_router

CUT = 0


@asynccontextmanager
async def load_on(found: FoundByKubernetes) -> AsyncIterator[list[int]]:
    """Twelve clients that call without a pause; the statuses of their requests, CUT for a stream that was cut."""
    statuses: list[int] = []

    async def client(number: int) -> None:
        while True:
            adapter = {"adapter": "a0"} if number % 2 else {}
            if number < 6:
                statuses.append((await found.cluster.post(prompt=f"{number}", **adapter))[0])
            else:
                events = await found.cluster.stream(prompt=f"{number}", **adapter)
                is_whole = events[-1] == b"[DONE]" and b'"error"' not in b"".join(events)
                if not is_whole:
                    assert len(events) > 1
                    assert json.loads(events[-1])["error"]["code"] == "worker_lost"
                statuses.append(200 if is_whole else CUT)

    clients = [asyncio.create_task(client(number)) for number in range(12)]
    try:
        yield statuses
    finally:
        for each in clients:
            each.cancel()
        ended = await asyncio.gather(*clients, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended


async def more(statuses: list[int], count: int = 24) -> None:
    """Wait for so many more answers."""
    until = len(statuses) + count
    await eventually(lambda: asyncio.sleep(0, len(statuses)), lambda now: now >= until, 30)


async def crash(found: FoundByKubernetes, worker: WorkerStandIn) -> tuple[int, int]:
    """While it has a stream that has begun and a request without a byte: how many streams it cuts, from and to."""
    held: dict[bool, str] = {}  # ids at the engine, which contain those of the requests

    async def holds(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> None:
        is_stream = fields.get("stream", False)
        if is_stream in held:
            return
        held[is_stream] = fields["rid"]
        if is_stream:
            await engine.stream(fields, request, 2)
        await asyncio.sleep(3600)

    worker.engine.behaviours = [holds] * 10_000

    async def phases() -> dict[bool, str]:
        """Of the two that are held: others may relay, and end before the crash."""
        running = (await found.cluster.admin("/debug/requests"))[1]["requests"]
        return {
            is_stream: each["sequences"][0]["phase"]
            for is_stream, rid in held.items()
            for each in running
            if each["request_id"] in rid
        }

    await eventually(phases, lambda now: now == {True: "relaying", False: "waiting_first_event"}, 60)
    num_running = worker.engine.num_running
    await asyncio.wait_for(worker.stop(), 10)
    return 1, num_running - 1


class Outage:
    """The clock between two attempts to reach the API server, which is away until `until_s` on it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.until_s = 0.0
        self.found: FoundByKubernetes | None = None

    async def pause(self, seconds: float) -> None:
        self.now_s += seconds / 3  # three sources, one per role, wait on it
        if self.found is not None and self.now_s > self.until_s:
            self.found.api.is_down = False
        await asyncio.sleep(0.01)


@pytest.mark.slow
def test_a_scripted_fleet_loses_no_request_but_the_streams_of_a_crash(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Scale up, drain, a crash, 410, an outage of 60 s. Others answer what had no byte yet when its worker crashed."""
    caplog.set_level(logging.WARNING)
    outage = Outage()

    async def scenario() -> None:
        async with kubernetes_router(tmp_path, pause=outage.pause, heartbeat_s=10) as found:
            u = [await found.worker(f"u{number}") for number in range(6)]
            for worker in u:
                worker.engine.event_gap_s = 0.01
            await found.publish(u[0])
            await found.has("u0", within_s=60)  # the client is slow to import
            async with load_on(found) as statuses:
                await found.publish(*u[:4])
                await found.has("u0", "u1", "u2", "u3", within_s=60)
                await more(statuses)

                # The Pod of u0 begins to end. Nobody has told its agent, and what runs there finishes.
                u[0].engine.event_gap_s = 0.3
                running = asyncio.create_task(found.cluster.stream(prompt="x " * 300))
                await eventually(lambda: asyncio.sleep(0, u[0].engine.num_running), bool)
                await found.api.terminate("unified", u[0].address)
                await found.has("u1", "u2", "u3", within_s=60)
                await more(statuses)  # so that what was on its way there has arrived
                served = len(u[0].engine.bodies)
                await more(statuses)
                assert len(u[0].engine.bodies) == served
                assert b'"error"' not in b"".join(await running)

                # u1 crashes. Its slice stays, as the API server does not know yet.
                cut = [await crash(found, u[1])]
                await more(statuses)
                await found.api.terminate("unified", u[1].address)
                await found.has("u2", "u3", within_s=60)

                # The watch expires while the fleet changes.
                found.api.is_down = True
                found.api.cut()
                await found.publish(u[3], u[4])
                await found.api.compact()
                found.api.is_down = False
                await found.has("u3", "u4", within_s=60)
                await more(statuses)

                # The API server is away for a minute, in which u3 crashes and u5 starts.
                outage.until_s = outage.now_s + 60
                outage.found = found
                found.api.is_down = True
                found.api.cut()
                await found.publish(u[3], u[4], u[5])
                cut.append(await crash(found, u[3]))
                await more(statuses, 48)
                await eventually(lambda: asyncio.sleep(0, outage.now_s), lambda now: now > outage.until_s, 30)
                await found.has("u4", "u5", unready=["u3"], within_s=60)
                await more(statuses)
            assert {*statuses} == {200, CUT}
            assert sum(least for least, _ in cut) <= statuses.count(CUT) <= sum(most for _, most in cut)

    asyncio.run(scenario())
    assert "workers cannot be looked up; keeping those that are known" in caplog.messages
