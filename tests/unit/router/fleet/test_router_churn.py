"""64 workers come and go, found by DNS, and no request fails."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from support.router_stand_ins import eventually
from support.routers.finding_router import finding_router


@pytest.mark.slow
async def test_64_workers_come_and_go_and_no_request_fails() -> None:
    seed = 7
    random = Random(seed)
    print(f"seed {seed}")
    async with finding_router(heartbeat_s=10) as found:
        workers = [await found.worker(f"u{number}") for number in range(64)]
        for worker in workers:
            worker.engine.event_gap_s = 0.01
        present = set(range(32))

        found.name(*(workers[number] for number in sorted(present)))
        await found.has(*(f"u{number}" for number in present), within_s=90)
        statuses: list[int] = []
        is_over = asyncio.Event()

        async def client(number: int) -> None:
            while not is_over.is_set():
                adapter = {"adapter": "a0"} if number % 2 else {}
                if number % 3:
                    status, _, _ = await found.cluster.post(prompt=f"{number}", **adapter)
                else:
                    events = await found.cluster.stream(prompt=f"{number}", **adapter)
                    status = 200 if events[-1] == b"[DONE]" and b'"error"' not in b"".join(events) else 0
                statuses.append(status)

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        seen: set[int] = set()
        for _ in range(8):
            present = set(random.sample(range(64), 32))
            seen |= present
            found.name(*(workers[number] for number in sorted(present)))
            await found.has(*(f"u{number}" for number in present), within_s=90)
        is_over.set()
        await asyncio.gather(*clients)
        assert len(seen) > 60
        assert len(statuses) > 50
        assert set(statuses) == {200}
        fleet = found.cluster.fleet
        await eventually(lambda: asyncio.sleep(0, len(fleet._links)), lambda count: count == 32)
        assert set(fleet.loads) <= {f"u{number}" for number in present}
        assert await found.series() <= {f"u{number}" for number in present}
