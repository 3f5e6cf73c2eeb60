"""The disk cache of a worker: write-behind, damage, restarts, disks that are full or fail, and bounds of copies."""

import asyncio
import errno
import hashlib
import shutil
import tracemalloc
from io import FileIO
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from support.adapters.full_disk import files_of_at_most
from support.adapters.held_adapters import StoredAdapters, Worker, running_worker, until
from support.descriptors import no_descriptors
from support.engines.engine_stand_in import Engine

from adapters.errors import AdapterError, HostExhausted
from adapters.store import Envelope, StoreCorrupt
from adapters.store.envelope import content_of
from cluster.control.worker_state import WorkerStateHub
from prefill_worker.residency.errors import AdapterInUse, DiskCacheFull, HostMemoryFull
from prefill_worker.residency.metrics import ResidencyMetrics
from prefill_worker.residency.threads import Stop, WorkThreads
from prefill_worker.residency.tiers import disk_cache
from prefill_worker.residency.tiers.disk_cache import DiskCache
from prefill_worker.residency.tiers.objects import checked_content, write_content

REVISION_ID = "sha256:" + "ab" * 32


async def test_an_agent_without_descriptors_keeps_its_disk_cache(stored: StoredAdapters, tmp_path: Path):
    """That a file cannot be opened does not make it a damaged one."""
    revision_id = stored.ids[0]
    path = tmp_path / "disk" / revision_id.replace(":", "-")
    path.parent.mkdir()
    shutil.copy(stored.object_of(revision_id), path)
    async with running_worker(stored, tmp_path) as worker:
        with no_descriptors():
            with pytest.raises(HostExhausted, match="Too many open files"):
                list(checked_content(path, revision_id))
            with pytest.raises(AdapterError) as caught:
                await worker.residency.ensure(revision_id, 5)
        assert (caught.value.http_status, caught.value.retryable) == (503, True)
        await worker.residency.ensure(revision_id, 5)
        assert worker.reads == []
        assert path.exists()


async def test_a_restarted_agent_has_its_disk_cache(stored: StoredAdapters, tmp_path: Path):
    a, b, c = stored.ids[:3]
    async with Engine().served() as engine:
        async with running_worker(stored, tmp_path, engine=engine) as worker:
            await worker.load(a, b, c)
        engine.held.clear()
        left_over = tmp_path / "disk" / (".sha256-" + "0" * 64 + "." + "1" * 32)
        left_over.write_bytes(b"half")
        async with running_worker(stored, tmp_path, disk=2, engine=engine) as worker:
            assert worker.hub.on_disk == {b, c}  # a was written first
            assert worker.value("prelude_worker_adapter_evictions_total", tier="disk") == 1
            assert not left_over.exists()
            await worker.residency.ensure(b, 5)
            assert worker.reads == []


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "another one's"])
async def test_a_damaged_file_on_disk_is_fetched_again(stored: StoredAdapters, worker: Worker, damage: str):
    a, b = stored.ids[:2]
    await worker.put_on_disk(a, b)
    path, other = (worker.disk / each.replace(":", "-") for each in (a, b))
    data = path.read_bytes()
    match damage:
        case "flipped":
            path.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
        case "cut":
            path.write_bytes(data[:-10])
        case "gone":
            path.unlink()
        case _:
            path.write_bytes(other.read_bytes())
    await worker.residency.ensure(a, 5)
    worker.engine.held[a].check_digest()
    assert worker.reads == [a, b, a]
    await worker.on_disk(a)
    await until(lambda: path.exists() and path.read_bytes() == data)
    assert worker.value("prelude_worker_adapter_loads_total", source="disk", result="damaged") == 1


async def test_write_behind_waits_for_loads_with_a_bound(stored: StoredAdapters, worker: Worker):
    a, b = stored.ids[:2]
    worker.engine.may_answer.clear()
    loads = [asyncio.create_task(worker.residency.ensure(a, 5))]
    await until(lambda: worker.engine.calls)
    loads.append(asyncio.create_task(worker.residency.ensure(b, 5)))
    await until(lambda: len(worker.engine.calls) == 2)
    worker.residency._on_resident(a)
    await asyncio.sleep(0.2)
    assert worker.hub.on_disk == set()
    await worker.on_disk(a)  # b is still being loaded
    assert not loads[1].done()
    worker.engine.may_answer.set()
    await asyncio.gather(*loads)
    await worker.on_disk(b)


async def test_without_a_disk_tier(stored: StoredAdapters, tmp_path: Path):
    a = stored.ids[0]
    async with running_worker(stored, tmp_path, disk=0) as worker:
        await worker.residency.ensure(a, 5)
        assert list(worker.disk.iterdir()) == []


async def test_a_real_full_disk(stored: StoredAdapters, tmp_path: Path, small_disk: Path):
    """It is smaller than its budget: old files are evicted, and adapters load without it if none can be."""
    a, b, c = stored.ids[:3]
    async with running_worker(stored, small_disk, disk=100) as worker:
        for each in (a, b, c):
            await worker.residency.ensure(each, 5)
        await until(lambda: not worker.residency._to_disk and c in worker.hub.on_disk)
        assert len(worker.hub.on_disk) < 3
        assert worker.hub.resident == {a, b, c}
        filler = small_disk / "filler"
        for each in list(worker.hub.on_disk):
            assert await worker.residency.evict(each, from_disk=True)
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(4 * stored.object_bytes))
        failures = worker.value("prelude_worker_adapter_disk_cache_failures_total")
        await worker.residency.ensure(stored.ids[3], 5)
        await until(lambda: worker.value("prelude_worker_adapter_disk_cache_failures_total") == failures + 1)
        filler.unlink()
        await worker.load(stored.ids[4])


async def test_an_intact_file_survives_failures_in_host_memory(stored: StoredAdapters, worker: Worker):
    a = stored.ids[0]
    await worker.put_on_disk(a)
    with files_of_at_most(20_000), pytest.raises(HostMemoryFull):
        await worker.residency.ensure(a, 2)
    for number in range(3, 20):  # in the way of the next folder
        (worker.shared / f"{a.replace(':', '-')}.{number}").mkdir(exist_ok=True)
    with pytest.raises(FileExistsError):
        await worker.residency.ensure(a, 5)
    for folder in worker.folders():
        folder.rmdir()
    assert worker.hub.on_disk == {a}
    await worker.residency.ensure(a, 5)
    assert worker.reads == [a]
    assert worker.value("prelude_worker_adapter_loads_total", source="disk", result="damaged") == 0


async def test_a_disk_that_cannot_delete(stored: StoredAdapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its files stay usable and count against the budget; adapters still load."""
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.parent == tmp_path / "disk" and not path.name.startswith("."):
            raise OSError(errno.EROFS, "Read-only file system")
        unlink(path, missing_ok)

    a, b, c = stored.ids[:3]
    async with running_worker(stored, tmp_path, disk=1) as worker:
        await worker.put_on_disk(a)
        with monkeypatch.context() as broken:
            broken.setattr(Path, "unlink", refuse)
            await worker.residency.ensure(b, 5)
            failures = "prelude_worker_adapter_disk_cache_failures_total"
            # Once every attempt to delete has failed: between two of them the file is not usable.
            await until(lambda: worker.value(failures) == disk_cache._MAX_FAILURES + 1)
            assert not worker.residency._to_disk
            assert worker.hub.resident == {b}
            assert worker.hub.on_disk == {a}
            assert worker.residency._disk.used_bytes == worker.disk_bytes() == stored.object_bytes
            with pytest.raises(DiskCacheFull, match="mend the disk"):
                await worker.residency.evict(a, from_disk=True)
            await worker.residency.ensure(a, 5)
            assert worker.reads.count(a) == 1

            (worker.disk / a.replace(":", "-")).write_bytes(b"damaged")
            await worker.residency.evict(a, from_disk=False)
            await worker.residency.ensure(a, 5)  # from the store
            assert worker.hub.on_disk == set()
            assert worker.residency._disk.used_bytes == stored.object_bytes
            await until(lambda: not worker.residency._to_disk)
            await worker.residency.evict(a, from_disk=False)
        await worker.put_on_disk(a, c)
        assert worker.hub.on_disk == {c}
        assert worker.disk_bytes() == stored.object_bytes


async def test_a_disk_that_cannot_be_written(stored: StoredAdapters, worker: Worker, tmp_path: Path):
    a, b = stored.ids[:2]
    worker.disk.rename(tmp_path / "moved")
    await worker.residency.ensure(a, 5)
    await until(lambda: worker.value("prelude_worker_adapter_disk_cache_failures_total") == 1)
    (tmp_path / "moved").rename(worker.disk)
    await worker.put_on_disk(b)


async def test_a_file_that_is_read_stays(stored: StoredAdapters, tmp_path: Path):
    a, b = stored.ids[:2]
    threads = WorkThreads(1)
    hub, metrics = WorkerStateHub(), ResidencyMetrics(CollectorRegistry(), "w", "unified")
    cache = DiskCache(tmp_path / "disk", stored.object_bytes, threads, hub, metrics)
    await cache.open()

    async def write(revision_id: str) -> None:
        content_bytes = stored.object_bytes - 88
        await cache.write(revision_id, content_bytes, lambda: stored.store.begin_read(revision_id)[1])

    await write(a)
    assert hub.on_disk == {a}
    with cache.reading(a) as content:
        with pytest.raises(AdapterInUse, match="being copied to or from the disk"):
            await cache.remove(a)
        with pytest.raises(DiskCacheFull):
            await write(b)
        assert sum(len(part) for part in content if not isinstance(part, Envelope)) == stored.object_bytes - 88
    await write(b)
    assert hub.on_disk == {b}
    assert cache.used_bytes == stored.object_bytes
    await threads.aclose()


@pytest.mark.slow
def test_copies_do_not_hold_the_file_in_memory(tmp_path: Path):
    content = bytes(96 * 1024**2)
    envelope = Envelope(REVISION_ID, hashlib.sha256(content).hexdigest(), len(content))
    (tmp_path / "object").write_bytes(envelope.encode() + content)
    tracemalloc.start()
    try:
        parts, target = checked_content(tmp_path / "object", REVISION_ID), FileIO(tmp_path / "copy", "xb")
        assert write_content(parts, target, len(content), Stop(), as_object=True) == envelope
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * 1024**2
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "object").read_bytes()


def test_never_more_is_written_than_there_is_room_reserved_for(tmp_path: Path):
    """Even if the envelope claims more."""
    content = bytes(1000)
    envelope = Envelope(REVISION_ID, hashlib.sha256(content).hexdigest(), len(content))
    chunks = [envelope.encode(), *(content[begin : begin + 100] for begin in range(0, 1000, 100))]
    target = FileIO(tmp_path / "copy", "xb")
    with pytest.raises(StoreCorrupt, match="more than the 450 bytes"):
        write_content(content_of(chunks, "key", REVISION_ID), target, 450, Stop(), as_object=False)
    assert (tmp_path / "copy").stat().st_size <= 450
