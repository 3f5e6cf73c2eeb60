"""Folders of evicted adapters that hold the next ones: fewer pages to clear, never more memory than the budget."""

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from support.adapters.held_adapters import StoredAdapters, running_worker, until
from support.adapters.random_adapters import write_random_lora

from cluster.control.worker_state import WorkerStateHub
from engine.client import IN_USE
from engine.errors import EngineRefused
from prefill_worker.residency.metrics import ResidencyMetrics
from prefill_worker.residency.threads import WorkThreads
from prefill_worker.residency.tiers.host_entry import HostState
from prefill_worker.residency.tiers.host_memory import HostMemory, room_bytes
from prefill_worker.residency.tiers.spare_folders import SpareFolders

FIRST, SECOND = (f"sha256:{letter * 64}" for letter in "ab")


def inodes(worker) -> set[int]:
    return {path.stat().st_ino for path in worker.shared.rglob("*.safetensors")}


async def test_an_adapter_is_written_over_the_one_that_made_room(stored: StoredAdapters, tmp_path: Path):
    ids = stored.ids[:6]
    async with running_worker(stored, tmp_path, host=2) as worker:
        await worker.load(*ids[:2])
        files = inodes(worker)
        for each in ids[2:]:
            await worker.load(each)
            worker.engine.held[each].check_digest()
            path = next(path for path in worker.shared.rglob("*.safetensors") if each[7:] in path.parent.name)
            assert path.read_bytes() == stored.packed[each].read_bytes()
        assert inodes(worker) <= files


async def test_adapters_of_another_size_take_the_room(stored: StoredAdapters, tmp_path: Path):
    """Spare folders of a size that nobody asks for any more are deleted."""
    large = stored.add(write_random_lora(tmp_path / "large", stored.base, 99, rank=16))
    num_bytes = room_bytes((tmp_path / "extra" / large.replace(":", "-")).stat().st_size)
    assert stored.room < num_bytes <= 2 * stored.room
    async with running_worker(stored, tmp_path, host=2) as worker:
        await worker.load(*stored.ids[:2])
        host = worker.residency._host
        worker.engine.may_answer.clear()
        given_up = asyncio.create_task(worker.residency.ensure(stored.ids[2], 5))
        await until(lambda: ("unload", stored.ids[0]) in worker.engine.calls)
        given_up.cancel()
        worker.engine.may_answer.set()
        await until(lambda: host._spares.num_bytes > 0)
        await worker.residency.ensure(large, 5)
        worker.engine.held[large].check_digest()
        assert host.used_bytes + host._spares.num_bytes <= host.budget_bytes
        assert worker.host_bytes() <= host.budget_bytes


async def test_no_folder_is_left_by_a_load_that_ends_before_it_writes(stored: StoredAdapters, tmp_path: Path):
    async with running_worker(stored, tmp_path, host=1) as worker:
        first, second = stored.ids[:2]
        await worker.load(first)
        host = worker.residency._host
        entry = await host.reserve(second, stored.packed[second].stat().st_size, lambda _: None)
        assert entry.spare is not None
        assert entry.spare.is_dir()
        await host.discard(entry)
        assert worker.folders() == []
        assert host.used_bytes == host._spares.num_bytes == 0


@asynccontextmanager
async def memory_for_one(folder: Path, unload: Callable[[str, float], Awaitable[bool]]) -> AsyncIterator[HostMemory]:
    """Host memory with room for one adapter, which it holds: a file of As, as it is after a load."""
    threads, engine = WorkThreads(1), SimpleNamespace(unload_adapter=unload)
    metrics = ResidencyMetrics(CollectorRegistry(), "w", "unified")
    host = HostMemory(folder, room_bytes(4096), threads, engine, WorkerStateHub(), metrics, reuses_folders=True)  # type: ignore[arg-type]
    first = await host.reserve(FIRST, 4096, lambda _: None)
    with first.open_packed() as file:
        file.write(b"A" * 4096)
    host.set_state(first, HostState.IN_MEMORY)
    first.may_be_in_engine = True
    yield host
    await threads.aclose()


@pytest.mark.parametrize(("is_confirmed", "may_be_in_engine"), [(True, True), (False, True), (True, False)])
async def test_a_file_is_written_over_only_if_the_engine_has_confirmed_that_it_let_go(
    tmp_path: Path, is_confirmed: bool, may_be_in_engine: bool
):
    """A load that was given up may end after the unload; an engine that has just started may have one."""
    unloaded = []

    async def unload(revision_id: str, _timeout_s: float) -> bool:
        unloaded.append(revision_id)
        return is_confirmed

    async with memory_for_one(tmp_path, unload) as host:
        [first] = host
        first.may_be_in_engine = may_be_in_engine
        with first.packed.open("rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ) as mapped:
            second = await host.reserve(SECOND, 4096, lambda _: None)
            with second.open_packed() as target:
                target.write(b"B" * 4096)
            is_kept = is_confirmed and may_be_in_engine
            assert mapped[:] == (b"B" if is_kept else b"A") * 4096
        assert unloaded == [FIRST] * may_be_in_engine
        assert len(os.listdir(tmp_path)) == 1


async def test_what_is_evicted_by_name_is_not_kept(tmp_path: Path):
    in_use = [True]

    async def unload(_: str, _timeout_s: float) -> bool:
        if in_use:
            raise EngineRefused(f"it {IN_USE}")
        return True

    async with memory_for_one(tmp_path, unload) as host:
        [first] = host
        waiting = asyncio.create_task(host.reserve(SECOND, 4096, lambda _: None))
        await until(lambda: host._spares.is_wanted(room_bytes(4096)) and first.state is HostState.IN_MEMORY)
        in_use.clear()
        assert await host.evict(FIRST)
        assert (await waiting).spare is None


def test_folders_are_taken_by_their_size_and_dropped_by_their_age():
    spares = SpareFolders()
    for name, num_bytes in (("a", 4), ("b", 8), ("c", 4)):
        spares.add(Path(name), num_bytes)
    assert spares.drop(12) == [Path("a")]
    assert spares.take(5) is None
    assert spares.take(4) == Path("c")
    assert (spares.drop(0), spares.num_bytes) == ([Path("b")], 0)
