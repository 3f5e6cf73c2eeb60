"""Clients that leave at any moment leave nothing behind: no load, no turn, no watch, no engine call."""

import asyncio
from random import Random
from typing import Any

import pytest
from support.router_stand_ins import (
    ClusterStandIn,
    after,
    answers,
    breaks_after,
    drops,
    eventually,
    hangs,
    post_bytes,
    running_cluster,
    stops_after,
)

from router import app
from router.fleet.capacity import has_capacity
from router.fleet.fleet_state import FleetState
from router.generation.request import Request, Requests
from router.identity.access import ANYBODY
from router.protocol.validation import Endpoint

NUM_REQUESTS = 60
TEXT = "The sea is wide. " * 50
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": TEXT, "stream": True}),
    ("/v1/completions", {"prompt": TEXT, "stream": True, "n": 3}),
    ("/v1/completions", {"prompt": [TEXT, "Hi"]}),
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 0}),
    ("/v1/embeddings", {"input": TEXT}),
    ("/v1/completions", {"prompt": [1, 2], "max_tokens": 0, "echo": True}),
]
FAILURES = [hangs, drops, answers(500), answers(503), answers(424), after(0.02), breaks_after(1), stops_after(1)]


async def ask_and_leave(cluster: ClusterStandIn, path: str, fields: dict[str, Any], stays_s: float) -> None:
    """Send a request and break the connection after a while, whatever has come by then."""
    reader, writer = await cluster.open(post_bytes(path, **fields))
    try:
        async with asyncio.timeout(stays_s):
            await reader.read()
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()


def left_behind(cluster: ClusterStandIn) -> dict[str, Any]:
    """All that counts requests in flight, where it is not zero."""
    fleet, found = cluster.fleet, dict[str, Any]()
    for name, load in fleet.loads.items():
        counts = load.num_sequences, load.prompt_tokens, load.placed_kv_tokens, load._num_reading, load.revisions
        found[name] = counts if any(counts) else None
    found["watches"] = sum(map(len, fleet._watches.values()))
    found["calls"] = sum(link._num_uses for link in fleet._links.values())
    found["engines"] = sum(worker.engine.num_running for worker in cluster.workers)
    return {name: value for name, value in found.items() if value}


@pytest.fixture
def coming(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """What is on its way, tokens and sequences, whenever the fair queue asks whether the fleet has room beyond that."""
    asked: list[tuple[float, float]] = []

    def noted(fleet: FleetState, now: float, *, coming_tokens: float, coming_sequences: float, **limits: Any) -> bool:
        asked.append((coming_tokens, coming_sequences))
        return has_capacity(fleet, now, coming_tokens=coming_tokens, coming_sequences=coming_sequences, **limits)

    monkeypatch.setattr(app, "has_capacity", noted)
    return asked


@pytest.mark.slow
async def test_clients_that_leave_at_any_moment_leave_nothing_behind(coming: list[tuple[float, float]]) -> None:
    random = Random(11)
    async with running_cluster(2, 2, 1, quotas={}, max_attempts=3) as cluster:
        asking = []
        for _ in range(NUM_REQUESTS):
            worker = random.choice(cluster.workers)
            worker.ensure_delay_s = random.choice([0.0, 0.0, 0.01, 0.05])
            worker.engine.event_gap_s = random.choice([0.0, 0.003])
            worker.engine.behaviours.append(random.choice(FAILURES))
            path, fields = random.choice(REQUESTS)
            if random.random() < 0.6:
                fields = {**fields, "adapter": "a0"}
            stays_s = random.choice([0.0, random.uniform(0, 0.02), random.uniform(0, 0.2)])
            asking.append(asyncio.create_task(ask_and_leave(cluster, path, fields, stays_s)))
            await asyncio.sleep(0.002)
        await asyncio.gather(*asking)
        await eventually(lambda: asyncio.sleep(0, left_behind(cluster)), lambda found: not found, within_s=120)
        await eventually(cluster.num_queued, lambda number: not number, within_s=120)
        assert (await cluster.admin("/debug/requests"))[1] == {"requests": []}
        for worker in cluster.workers:  # none of them stays blocked, and all serve
            worker.engine.behaviours.clear()
            worker.ensure_delay_s = 0.0
        await cluster.is_ready()
        coming.clear()
        assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
        assert coming[0] == (0, 0)  # no turn is left that never ends


async def test_who_waits_for_the_last_request_hears_of_its_end() -> None:
    requests = Requests()
    with requests.record(Request("id", Endpoint.COMPLETIONS, ANYBODY)):
        waiting = asyncio.create_task(requests.wait_until_empty(3600.0))
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 120)
