"""Room that is made before anybody waits for it: those that do not fit come faster, those that fit are left alone."""

import asyncio
import random
from collections import OrderedDict
from pathlib import Path

import pytest
from held_adapters import StoredAdapters, eventually, running_worker

from prefill_worker.residency import Tier
from prefill_worker.residency.room_ahead import RoomAhead


class Memory:
    """Host memory in which evictions take no time."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.ahead = RoomAhead(budget)
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
        is_short = self.ahead.take(name, size, self.free)
        self.num_waits += self.free < size
        while self.free < size:
            self.held.popitem(last=False)
        self.held[name] = size
        if is_short:
            while self.free < self.ahead.goal_bytes:
                self.ahead.add(*self.held.popitem(last=False))


def names(count: int) -> list[str]:
    return [f"a{number}" for number in range(count)]


class TestOfOneSize:
    def test_nothing_is_evicted_while_all_fit(self):
        memory = Memory(32)
        for name in names(32):
            memory.ask(name)
        assert memory.free == 0

    def test_only_the_first_that_does_not_fit_waits(self):
        memory = Memory(32)
        for name in names(128) * 3:
            memory.ask(name)
        assert memory.num_loads == 3 * 128
        assert memory.num_waits == 1
        assert memory.free == 4  # an eighth

    def test_those_that_just_fit_come_back_and_stay(self):
        memory = Memory(32)
        for name in names(128) + names(32) * 2:
            memory.ask(name)
        assert memory.free == 0
        num_loads = memory.num_loads
        for name in names(32) * 3:
            memory.ask(name)
        assert memory.num_loads == num_loads

    def test_large_memories_keep_as_much_free_as_is_loaded_side_by_side(self):
        memory = Memory(10_000)
        for name in names(10_001):
            memory.ask(name)
        assert memory.free == 8

    def test_small_ones_keep_nothing_free(self):
        memory = Memory(7)
        for name in names(20):
            memory.ask(name)
        assert memory.free == 0


@pytest.mark.parametrize("seed", range(20))
def test_of_many_sizes(seed):
    """What was evicted ahead is never more than what is free, and what fits is left alone in the end."""
    chance = random.Random(seed)
    memory = Memory(100)
    sizes = {name: chance.randint(1, 12) for name in names(60)}
    for name in chance.choices(list(sizes), k=2000):
        memory.ask(name, sizes[name])
        assert 0 <= memory.ahead._evicted_bytes == sum(memory.ahead._evicted.values()) <= memory.free
        assert not memory.held.keys() & memory.ahead._evicted.keys()
    fitting: list[str] = []
    for name, size in sizes.items():
        if sum(sizes[each] for each in fitting) + size <= 100:
            fitting.append(name)
    for name in fitting * 3:
        memory.ask(name, sizes[name])
    num_loads = memory.num_loads
    for name in fitting * 3:
        memory.ask(name, sizes[name])
    assert memory.num_loads == num_loads


def test_a_load_does_not_wait_for_an_eviction_if_there_was_one_before(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        async with running_worker(stored, tmp_path, host=8) as worker:
            for each in stored.ids[:8]:
                await worker.residency.ensure(each, Tier.HOST, 5)
            await worker.on_disk(*stored.ids[:8])  # until then they are held
            assert worker.hub.resident == set(stored.ids[:8])
            await worker.residency.ensure(stored.ids[8], Tier.HOST, 5)
            await eventually(lambda: worker.hub.resident == set(stored.ids[2:9]))
            await worker.on_disk(stored.ids[8])
            worker.engine.in_use.update(stored.ids)  # nothing can be evicted now
            await worker.residency.ensure(stored.ids[9], Tier.HOST, 1)
            worker.engine.in_use.clear()
            assert worker.hub.resident == set(stored.ids[2:10])

    asyncio.run(scenario())


def test_one_that_was_evicted_ahead_comes_back_to_stay(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        async with running_worker(stored, tmp_path, host=8) as worker:
            for each in stored.ids[:8]:
                await worker.residency.ensure(each, Tier.HOST, 5)
            await worker.on_disk(*stored.ids[:8])
            await worker.residency.ensure(stored.ids[8], Tier.HOST, 5)
            await eventually(lambda: worker.hub.resident == set(stored.ids[2:9]))
            worker.engine.calls.clear()
            for each in stored.ids[1:9]:
                await worker.residency.ensure(each, Tier.HOST, 5)
            await asyncio.sleep(0.1)
            names = {each: number for number, each in enumerate(stored.ids)}
            assert [(call, names[each]) for call, each in worker.engine.calls] == [("load", 1)]

    asyncio.run(scenario())


def test_a_worker_stops_while_it_evicts_ahead(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        async with running_worker(stored, tmp_path, host=8) as worker:
            for each in stored.ids[:8]:
                await worker.residency.ensure(each, Tier.HOST, 5)
            await worker.on_disk(*stored.ids[:8])
            worker.engine.may_answer.clear()
            asking = asyncio.create_task(worker.residency.ensure(stored.ids[8], Tier.HOST, 5))
            await eventually(lambda: sum(call == "unload" for call, _ in worker.engine.calls) == 2)
            asking.cancel()
            asyncio.get_running_loop().call_later(0.2, worker.engine.may_answer.set)
            await worker.residency._host.aclose()
            await asyncio.wait([asking])
            assert worker.hub.resident == set(worker.engine.held) == set(stored.ids[2:8])
        # `running_worker` has seen that nothing is left

    asyncio.run(scenario())
