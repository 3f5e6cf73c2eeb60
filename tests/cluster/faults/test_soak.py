"""A steady load on two real workers with disconnecting clients and a kill a minute.

First the capacity is measured, with a fixed number of clients. Then requests arrive at random at a share of it that one
worker can serve alone, under many adapters of Zipf popularity, whatever becomes of the ones before; some clients leave
early. Complete answers are compared with those of a quiet cluster.
"""

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil
import pytest
from support.clusters.shaken_cluster import LAYOUTS, Kind, ShakenCluster, shaken_cluster

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(5400)]

MINUTES = 12.0
LOAD = 0.35  # of the measured capacity
NUM_ADAPTERS = 200
KILL_EVERY_S = 60.0
BACK_WITHIN_S = 30.0  # of a kill: from then on nothing fails, until the next
LEAVING = 0.05  # share of the clients
KIND = Kind(96, 16)
PARTS = ("agent", "server", "scheduler", "detokenizer")
MORE_DESCRIPTORS = 64  # of one process in its longest life


@dataclass
class Seen:
    """Times are seconds since the start of the load."""

    outcomes: list[tuple[float, float, str]] = field(default_factory=list)  # (began, ended, outcome)
    kills: list[tuple[float, str]] = field(default_factory=list)
    descriptors: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # by process and life

    def failed_late(self) -> list[str]:
        """Requests that began when a kill should have been forgotten, and ended before the next."""
        nexts = [*(at_s for at_s, _ in self.kills[1:]), float("inf")]
        return [
            f"{outcome} {began_s - at_s:.0f} s after the kill of {victim}"
            for (at_s, victim), next_s in zip(self.kills, nexts, strict=True)
            for began_s, ended_s, outcome in self.outcomes
            if at_s + BACK_WITHIN_S <= began_s and ended_s < next_s and outcome not in ("answered", "left")
        ]


def test_it_serves_through_a_kill_a_minute(tmp_path: Path) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")

    async def scenario() -> tuple[Seen, list[str]]:
        async with shaken_cluster("unified", NUM_ADAPTERS, tmp_path) as system:
            soak = Soak(system, Random(seed))
            await soak.learn_answers()
            capacity = await soak.capacity()
            system.count_what_is_kept()
            print(f"capacity {capacity:.1f} requests/s", flush=True)
            await soak.load(LOAD * capacity)
            await system.until_ready()
            return soak.seen, await system.left_behind()

    seen, left_behind = asyncio.run(scenario())
    counts = Counter(outcome for _, _, outcome in seen.outcomes)
    print(counts, seen.kills)
    assert counts["answered"] > 0.8 * counts.total()
    assert counts["wrong answer"] == counts["hung"] == 0
    assert len(seen.kills) == MINUTES * 60 / KILL_EVERY_S - 1
    assert seen.failed_late() == []
    assert left_behind == []
    life = max(seen.descriptors.values(), key=len)
    quarter = len(life) // 4
    assert min(life[-quarter:]) < max(life[:quarter]) + MORE_DESCRIPTORS


class Soak:
    def __init__(self, system: ShakenCluster, random: Random) -> None:
        self._system, self._random = system, random
        self._weights = [1 / (rank + 1) for rank in range(NUM_ADAPTERS)]
        self._right: dict[int, str] = {}  # by adapter
        self._began_at = 0.0
        self.seen = Seen()

    async def learn_answers(self) -> None:
        for adapter in range(NUM_ADAPTERS):
            answer = await self._system.ask(adapter, KIND)
            assert answer.outcome == "answered", answer.outcome
            self._right[adapter] = answer.text

    async def capacity(self, num_requests: int = 200, num_clients: int = 16) -> float:
        """Requests/s with a fixed number of clients."""
        left, began_at = iter(range(num_requests)), time.monotonic()

        async def client() -> None:
            for _ in left:
                answer = await self._system.ask(self._an_adapter(), KIND)
                assert answer.outcome == "answered", answer.outcome

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return num_requests / (time.monotonic() - began_at)

    async def load(self, per_s: float) -> None:
        """Poisson arrivals, and a kill a minute until BACK_WITHIN_S before the end."""
        self._began_at = time.monotonic()
        end_s, due_s, kill_s = 60 * MINUTES, 0.0, KILL_EVERY_S
        looks = asyncio.create_task(self._look_at_descriptors())
        try:
            async with asyncio.TaskGroup() as group:
                while (due_s := due_s + self._random.expovariate(per_s)) < end_s:
                    await asyncio.sleep(max(0.0, due_s - self._now_s()))
                    if kill_s <= due_s and kill_s < end_s - BACK_WITHIN_S:
                        self._kill()
                        kill_s += KILL_EVERY_S
                    group.create_task(self._client(self._an_adapter()))
        finally:
            looks.cancel()

    async def _client(self, adapter: int) -> None:
        began_s = self._now_s()
        patience_s = self._random.uniform(0, 1) if self._random.random() < LEAVING else None
        try:
            async with asyncio.timeout(patience_s):
                answer = await self._system.ask(adapter, KIND)
        except TimeoutError:
            outcome = "left"
        else:
            is_wrong = answer.outcome == "answered" and answer.text != self._right[adapter]
            outcome = "wrong answer" if is_wrong else answer.outcome
        self.seen.outcomes.append((began_s, self._now_s(), outcome))

    def _kill(self) -> None:
        workers = [(worker, part) for worker in LAYOUTS["unified"] for part in PARTS]
        for worker, part in self._random.sample([("", "router"), *workers], len(workers) + 1):
            with contextlib.suppress(LookupError, psutil.Error):
                self._system.process(worker, part).kill()
                self.seen.kills.append((self._now_s(), f"{worker} {part}".strip()))
                return
        raise AssertionError("there is no process left to kill")

    async def _look_at_descriptors(self) -> None:
        while True:
            for name, use in (await asyncio.to_thread(self._system.uses)).items():
                self.seen.descriptors.setdefault((name, use.pid), []).append(use.descriptors)
            await asyncio.sleep(5.0)

    def _an_adapter(self) -> int:
        return self._random.choices(range(NUM_ADAPTERS), self._weights)[0]

    def _now_s(self) -> float:
        return time.monotonic() - self._began_at
