"""The host memory tier under load: LRU eviction, leases, adapters in use, pins, and shared memory that runs short."""

import asyncio
import gc
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from support.adapters.full_disk import files_of_at_most
from support.adapters.held_adapters import StoredAdapters, Worker, running_worker, until
from support.adapters.random_adapters import write_random_lora
from support.held_calls import failing

from adapters.errors import AdapterIncompatible, AdapterTooLarge
from adapters.formats import Limits
from engine.errors import EngineError
from prefill_worker.residency.errors import AdapterInUse, HostMemoryFull, PinsExceedBudget
from prefill_worker.residency.tiers import host_memory
from prefill_worker.residency.tiers.pins import Pins


async def test_least_recently_used_ones_make_room(stored: StoredAdapters, tmp_path: Path):
    a, b, c, d = stored.ids[:4]
    async with running_worker(stored, tmp_path, host=3) as worker:
        for each in (a, b, c, a):
            await worker.residency.ensure(each, 5)
        await worker.on_disk(a, b, c)
        await worker.residency.ensure(d, 5)
        assert worker.hub.resident == set(worker.engine.held) == {a, c, d}
        assert 2 * stored.room < worker.host_bytes() <= 3 * stored.room
        assert worker.value("prelude_worker_adapter_evictions_total", tier="host") == 1
        await worker.residency.ensure(b, 5)
        assert worker.reads.count(b) == 1  # the second time it came from the disk
        assert worker.value("prelude_worker_adapter_loads_total", source="disk", result="ok") == 1


async def test_an_adapter_in_use_is_not_evicted(stored: StoredAdapters, tmp_path: Path):
    a, b, c = stored.ids[:3]
    async with running_worker(stored, tmp_path, host=2) as worker:
        await worker.load(a, b)
        worker.engine.in_use.add(a)
        await worker.residency.ensure(c, 5)
        assert worker.hub.resident == set(worker.engine.held) == {a, c}
        worker.engine.held[a].check_digest()
        with pytest.raises(AdapterInUse, match="in use by requests"):
            await worker.residency.evict(a, from_disk=False)
        assert await worker.residency.ensure(a, 5) == 0

        await worker.on_disk(c)
        worker.engine.in_use.add(c)
        with pytest.raises(HostMemoryFull, match=r"all 2 adapters .* are in use, leased or pinned"):
            await worker.residency.ensure(b, 0.3)
        waiting = asyncio.create_task(worker.residency.ensure(b, 5))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        worker.engine.in_use.clear()
        await waiting
        assert b in worker.hub.resident


async def test_a_leased_adapter_is_not_evicted(stored: StoredAdapters, tmp_path: Path):
    a, b = stored.ids[:2]
    async with running_worker(stored, tmp_path, host=1, lease_s=0.6) as worker:
        began = time.monotonic()
        await worker.residency.ensure(a, 5)
        await asyncio.sleep(0.3)
        await worker.residency.ensure(a, 5)  # renewed
        with pytest.raises(AdapterInUse, match="leased to a request"):
            await worker.residency.evict(a, from_disk=False)
        with pytest.raises(HostMemoryFull):
            await worker.residency.ensure(b, 0.2)
        await worker.residency.ensure(b, 5)
        assert time.monotonic() - began >= 0.9


async def test_a_request_that_came_too_late_gets_a_longer_lease(stored: StoredAdapters, tmp_path: Path):
    """Its router retries a few times only."""
    a, b = stored.ids[:2]
    async with running_worker(stored, tmp_path, host=1, lease_s=0.1) as worker:
        await worker.residency.ensure(a, 5)
        await worker.residency.ensure(b, 5)  # once the lease is over
        await worker.residency.ensure(a, 5, not_in_engine=True)
        with pytest.raises(HostMemoryFull):
            await worker.residency.ensure(b, 0.4)
        await worker.residency.ensure(b, 5)


@pytest.mark.parametrize("is_during_a_round", [False, True])
async def test_a_load_waits_no_longer_than_for_the_next_end_of_a_lease(
    is_during_a_round: bool, stored: StoredAdapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """There are pauses between rounds, and leases end without a notice."""
    monkeypatch.setattr(host_memory, "_RETRY_S", (60.0, 60.0))
    full = host_memory.HostMemory._full

    def full_a_second_later(*arguments: Any) -> Any:
        time.sleep(is_during_a_round)
        return full(*arguments)

    monkeypatch.setattr(host_memory.HostMemory, "_full", full_a_second_later)

    a, b = stored.ids[:2]
    async with running_worker(stored, tmp_path, host=1, lease_s=0.7) as worker:
        await worker.residency.ensure(a, 5)
        leased_at = asyncio.get_running_loop().time()
        [entry] = worker.residency._host
        ends_at = entry.lease_until_s
        await worker.residency.ensure(b, 90)
        waited_s = asyncio.get_running_loop().time() - ends_at
        assert ends_at - leased_at > 0.6
        assert 0 <= waited_s < 30  # the next round would have come after 60 s


async def test_a_load_during_its_eviction(stored: StoredAdapters, worker: Worker):
    a = stored.ids[0]
    await worker.load(a)
    worker.engine.may_answer.clear()
    evicting = asyncio.create_task(worker.residency.evict(a, from_disk=False))
    await until(lambda: ("unload", a) in worker.engine.calls)
    wanted = asyncio.create_task(worker.residency.ensure(a, 5))
    await asyncio.sleep(0.05)
    assert not wanted.done()
    worker.engine.may_answer.set()
    assert await evicting
    await wanted
    assert worker.engine.calls == [("load", a), ("unload", a), ("load", a)]
    assert a in worker.engine.held
    worker.engine.held[a].check_digest()


async def test_an_eviction_that_is_cancelled_is_finished(stored: StoredAdapters, worker: Worker):
    a = stored.ids[0]
    await worker.load(a)
    worker.engine.may_answer.clear()
    evicting = asyncio.create_task(worker.residency.evict(a, from_disk=False))
    await until(lambda: ("unload", a) in worker.engine.calls)
    evicting.cancel()
    worker.engine.may_answer.set()
    await asyncio.wait([evicting])
    assert worker.hub.resident == set(worker.engine.held) == set()
    assert worker.folders() == []


async def test_evict(stored: StoredAdapters, worker: Worker):
    a, b = stored.ids[:2]
    await worker.put_on_disk(a)
    assert (worker.hub.resident, worker.hub.on_disk) == (set(), {a})
    assert await worker.residency.evict(a, from_disk=True)
    assert worker.hub.on_disk == set()
    assert list(worker.disk.iterdir()) == []
    assert not await worker.residency.evict(a, from_disk=True)
    worker.engine.may_answer.clear()
    loading = asyncio.create_task(worker.residency.ensure(b, 5))
    await until(lambda: ("load", b) in worker.engine.calls)
    with pytest.raises(AdapterInUse, match="being loaded"):
        await worker.residency.evict(b, from_disk=False)
    worker.engine.may_answer.set()
    await loading


async def test_a_folder_removed_by_others(stored: StoredAdapters, tmp_path: Path):
    """It can be evicted and reloaded; the engine's mapping stays valid."""
    a, b = stored.ids[:2]
    async with running_worker(stored, tmp_path, host=1) as worker:
        await worker.load(a)
        shutil.rmtree(worker.folders()[0])
        worker.engine.in_use.add(a)
        with pytest.raises(AdapterInUse, match="in use by requests"):
            await worker.residency.evict(a, from_disk=False)
        assert worker.hub.resident == {a}
        worker.engine.in_use.clear()
        await worker.residency.ensure(b, 5)
        assert worker.hub.resident == set(worker.engine.held) == {b}
        await worker.on_disk(b)
        await worker.residency.ensure(a, 5)

        await worker.engine_ends()
        shutil.rmtree(worker.folders()[0])
        await worker.engine.start()
        with pytest.raises(EngineError):  # the adapter itself is not refused
            await worker.residency.ensure(a, 5)
        await worker.residency.ensure(a, 5)


async def test_an_eviction_that_fails_unexpectedly_ends(
    stored: StoredAdapters, worker: Worker, monkeypatch: pytest.MonkeyPatch
):
    a = stored.ids[0]
    await worker.load(a)
    failing(monkeypatch, worker.residency._host._engine, "unload_adapter", KeyError("success"))
    with pytest.raises(KeyError):
        await worker.residency.evict(a, from_disk=False)
    assert worker.hub.resident == set()  # unknown, so not resident
    await worker.residency.ensure(a, 5)
    assert worker.hub.resident == {a}
    worker.engine.held[a].check_digest()
    assert await worker.residency.evict(a, from_disk=False)


async def test_larger_than_all_of_host_memory(stored: StoredAdapters, tmp_path: Path):
    async with running_worker(stored, tmp_path, host_bytes=stored.room - 1) as worker:
        with pytest.raises(AdapterTooLarge, match=r"residency.host_bytes of \d+; raise it"):
            await worker.residency.ensure(stored.ids[0], 5)


async def test_shared_memory_with_less_room_than_the_budget(stored: StoredAdapters, tmp_path: Path):
    """A clear error, and recovery without help."""
    a, b = stored.ids[:2]
    async with running_worker(stored, tmp_path, disk=0) as worker:
        with files_of_at_most(20_000):
            with pytest.raises(HostMemoryFull, match=r"has no room .* lower it, or give this worker more"):
                await worker.residency.ensure(a, 3)
            assert worker.folders() == []
            waiting = asyncio.create_task(worker.residency.ensure(b, 10))
            await asyncio.sleep(0.2)
        await waiting


async def test_shared_memory_that_is_really_smaller_than_the_budget(
    stored: StoredAdapters, tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
):
    """The least recently used adapters are evicted, as if the budget was smaller."""
    async with running_worker(stored, tmp_path, shared_memory=small_disk) as worker:
        assert "shared memory is smaller than residency.host_bytes" in caplog.text
        for each in stored.ids[:6]:
            await worker.residency.ensure(each, 5)
            assert each in worker.engine.held
        assert 1 <= len(worker.hub.resident) <= 2


@pytest.mark.slow
async def test_nothing_stays_mapped(stored: StoredAdapters, tmp_path: Path):
    wide = stored.add(write_random_lora(tmp_path / "wide", stored.base, 50, rank=32))

    async with running_worker(stored, tmp_path, limits=Limits(max_rank=16)) as worker:
        await worker.residency.ensure(stored.ids[0], 5)
        with pytest.raises(AdapterIncompatible):
            await worker.residency.ensure(wide, 5)
        gc.collect()  # the refusal's frames refer to the file
        assert worker.num_mappings() == 1  # the stand-in's
        await worker.on_disk(stored.ids[0])
        await worker.residency.evict(stored.ids[0], from_disk=False)
        assert worker.num_mappings() == 0


def test_one_that_is_released_during_a_call_keeps_its_room():
    pins = Pins(100, lambda: None)
    for _ in range(2):
        with pins.pinning("a", 60):
            pins.release("a")
            with pytest.raises(PinsExceedBudget), pins.pinning("b", 60):
                pass
        assert pins.is_kept("a")


def test_of_calls_that_overlap_one_is_enough():
    pins = Pins(100, lambda: None)
    first, second = pins.pinning("a", 60), pins.pinning("a", 60)
    first.__enter__()
    second.__enter__()
    assert not first.__exit__(TimeoutError, TimeoutError(), None)
    assert "a" in pins
    second.__exit__(None, None, None)
    assert pins.is_kept("a")
