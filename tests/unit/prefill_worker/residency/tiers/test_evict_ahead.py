"""Eviction ahead of demand: loads that do not fit find room free, and a working set that fits stays."""

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.adapters.held_adapters import StoredAdapters, Worker, running_worker, until
from support.adapters.random_adapters import write_random_lora

from prefill_worker.residency.tiers.evict_ahead import EvictAhead


class Memory:
    """Host memory in which evictions take no time."""

    def __init__(self, budget: int, is_ahead: bool = True) -> None:
        self.budget = budget
        self.is_ahead = is_ahead
        self.ahead = EvictAhead()
        self.held: OrderedDict[str, int] = OrderedDict()
        self.num_loads = 0
        self.num_waits = 0

    @property
    def free(self) -> int:
        return self.budget - sum(self.held.values())

    def ask(self, name: str, size: int = 1) -> None:
        if name in self.held:
            self.held.move_to_end(name)
            return
        self.num_loads += 1
        is_short = self.ahead.reserve(name, size, self.free)
        self.num_waits += self.free < size
        while self.free < size:
            self.held.popitem(last=False)
        self.held[name] = size
        self.ahead.limit(self.free)
        while is_short and self.is_ahead and self.free < self.ahead.goal_bytes(size, self.budget):
            self.ahead.add(*self.held.popitem(last=False))
        assert self.ahead.num_bytes <= self.free

    def loads_of(self, asked: list[str]) -> int:
        before = self.num_loads
        for name in asked:
            self.ask(name)
        return self.num_loads - before


def names(count: int) -> list[str]:
    return [f"a{number}" for number in range(count)]


def test_only_the_first_that_do_not_fit_wait():
    memory = Memory(32)
    assert memory.loads_of(names(128) * 3) == 3 * 128
    assert memory.num_waits == 3
    assert memory.free == 4  # an eighth
    assert memory.loads_of(names(32) * 5) < 3 * 32  # those that just fit come back and stay


@pytest.mark.parametrize(("count", "loads", "waits"), [(33, 1.45, 0.6), (40, 1.25, 0.25), (64, 1.1, 0.05)])
def test_a_few_too_many(count: int, loads: float, waits: float):
    """Uniform requests. The closer the set is to fitting, the fewer are evicted ahead."""
    asked = random.Random(1).choices(names(count), k=20_000)
    with_ahead, without = Memory(32), Memory(32, is_ahead=False)
    assert with_ahead.loads_of(asked) < loads * without.loads_of(asked)
    assert with_ahead.num_waits < waits * with_ahead.num_loads


@asynccontextmanager
async def full_worker(stored: StoredAdapters, tmp_path: Path) -> AsyncIterator[Worker]:
    """A worker with room for eight adapters that has evicted number 3 ahead and holds 4 to 10."""
    async with running_worker(stored, tmp_path, host=8) as worker:
        await worker.load(*stored.ids[:11])
        assert worker.hub.resident == set(stored.ids[4:11])
        yield worker


def numbered(stored: StoredAdapters, worker: Worker) -> list[tuple[str, int]]:
    return [(call, stored.ids.index(each)) for call, each in worker.engine.calls]


async def test_a_load_does_not_wait_for_an_eviction(stored: StoredAdapters, tmp_path: Path):
    async with full_worker(stored, tmp_path) as worker:
        worker.engine.in_use.update(stored.ids)  # nothing can be evicted now
        await worker.residency.ensure(stored.ids[11], 1)
        assert worker.hub.resident == set(stored.ids[4:12])
        worker.engine.in_use.clear()


async def test_one_evicted_ahead_and_requested_again_stays(stored: StoredAdapters, tmp_path: Path):
    async with full_worker(stored, tmp_path) as worker:
        worker.engine.calls.clear()
        for each in stored.ids[3:11] * 2:
            await worker.residency.ensure(each, 5)
        await asyncio.sleep(0.1)
        assert numbered(stored, worker) == [("load", 3)]


async def test_one_requested_during_its_eviction_is_no_ghost(stored: StoredAdapters, tmp_path: Path):
    async with full_worker(stored, tmp_path) as worker:
        worker.engine.may_answer.clear()
        host, calls = worker.residency._host, worker.engine.calls
        calls.clear()
        wanted = [asyncio.create_task(worker.residency.ensure(stored.ids[11], 5))]
        await until(lambda: ("unload", 4) in numbered(stored, worker))
        wanted.append(asyncio.create_task(worker.residency.ensure(stored.ids[4], 5)))
        await asyncio.sleep(0.05)
        worker.engine.may_answer.set()
        await asyncio.gather(*wanted)
        assert worker.hub.resident == set(stored.ids[4:12])
        assert host._ahead.num_bytes == 0


async def test_pinned_bytes_do_not_count_as_evictable(stored: StoredAdapters, tmp_path: Path):
    async with running_worker(stored, tmp_path, host=9) as worker:
        for each in stored.ids[:2]:
            await worker.residency.ensure(each, 5)
            await worker.residency.pin(each, 5)
        await worker.load(*stored.ids[2:])
        await asyncio.sleep(0.05)
        assert len(worker.hub.resident) == 9


async def test_a_large_adapter_is_not_evicted_ahead_for_small_ones(stored: StoredAdapters, tmp_path: Path):
    large = stored.add(write_random_lora(tmp_path / "large", stored.base, 1, rank=16))
    async with running_worker(stored, tmp_path, host=10) as worker:
        await worker.load(*(large, *stored.ids[:3]))
        host, room = worker.residency._host, stored.room
        large_room = host._entries[large].num_bytes
        assert room < large_room <= 2 * room

        def victims(num_bytes: int, ahead_bytes: int) -> dict[str, bool]:
            found = host._victims(num_bytes, ahead_bytes, set())
            return {entry.revision_id: is_ahead for entry, is_ahead in found.items()}

        assert victims(0, room) == {}
        assert victims(1, room) == {large: False}  # and what it leaves free is enough for the next one
        assert victims(large_room, room) == {large: False, stored.ids[0]: True}
        assert victims(-room, 2 * room) == {}
        assert victims(0, 2 * room) == {large: True}
        assert victims(-room, room) == {}


async def test_a_worker_stops_while_it_evicts_ahead(stored: StoredAdapters, tmp_path: Path):
    async with full_worker(stored, tmp_path) as worker:
        worker.engine.may_answer.clear()
        worker.engine.calls.clear()
        asking = asyncio.create_task(worker.residency.ensure(stored.ids[11], 5))
        await until(lambda: ("unload", 4) in numbered(stored, worker))
        asking.cancel()
        asyncio.get_running_loop().call_later(0.2, worker.engine.may_answer.set)
        await worker.residency._host.aclose()
        await asyncio.wait([asking])
        assert stored.ids[4] not in worker.hub.resident
        worker.residency._host._evict_ahead(1)
        assert worker.residency._host._ahead_task.done()
        # `running_worker` checks that nothing is left
