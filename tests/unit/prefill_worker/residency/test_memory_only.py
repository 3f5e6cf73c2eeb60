"""Pushed adapters that no store has: the worker keeps them in memory only."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.adapters.held_adapters import (
    CHUNK_BYTES,
    StoredAdapters,
    Worker,
    announced,
    pack,
    running_worker,
    sent,
    until,
)
from support.adapters.random_adapters import write_random_lora, write_random_reft

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterUnsupported, InvalidReference
from adapters.files.digest import sha256_of_chunks
from adapters.formats.safetensors_file import header_of
from adapters.identity import folder_of
from adapters.packed import announced_sha256, read_packed
from adapters.packed.metadata import CHUNKED, DTYPE_CODES
from adapters.store import Envelope, RevisionNotStored
from engine.errors import EngineError
from prefill_worker.residency import residency
from prefill_worker.residency.errors import AdapterInUse, AdapterNotReceived, HostMemoryFull, PinsExceedBudget


def unstored(stored: StoredAdapters, revision_id: str) -> tuple[Envelope, bytes]:
    """A revision removed from the store: its announcement and its packed file."""
    stored.object_of(revision_id).unlink()
    return announced(revision_id, stored.packed[revision_id])


def damaged_in_chunks(path: Path, folder: Path) -> tuple[Envelope, bytes]:
    """The announcement of a packed file whose digest is that of chunks, and its content with a bit changed."""
    packed = read_packed(path)
    metadata = replace(packed.metadata, format=CHUNKED, tensors_sha256=sha256_of_chunks(packed.data))
    sizes = {name: (DTYPE_CODES[metadata.dtype], each.shape, each.nbytes) for name, each in packed.tensors.items()}
    (folder / "chunked").write_bytes(header_of(sizes, metadata.to_header()) + packed.data)
    content = (folder / "chunked").read_bytes()
    envelope = Envelope(metadata.revision_id, announced_sha256(folder / "chunked"), len(content))
    return envelope, content[:-1] + bytes([content[-1] ^ 1])


async def nothing() -> AsyncIterator[bytes]:
    raise AssertionError("it needs no content")
    yield b""


def is_empty(worker: Worker) -> bool:
    host = worker.residency._host
    return not (host.used_bytes or host.pins or worker.folders() or worker.hub.in_memory_only or worker.hub.resident)


def on_any_disk(worker: Worker, revision_id: str) -> bool:
    return any(revision_id.replace(":", "-") in path.name for path in worker.disk.rglob("*"))


async def test_it_is_resident_and_pinned_and_on_no_disk(stored: StoredAdapters, tmp_path: Path):
    a, *others = stored.ids
    envelope, content = unstored(stored, a)
    async with running_worker(stored, tmp_path, host=2) as worker:
        assert not await worker.residency.put(envelope, sent(content), 5)  # it was not pinned
        held = worker.engine.held[a]
        held.check_digest()
        assert held.path.read_bytes() == content
        assert worker.hub.resident == worker.hub.in_memory_only == {a}
        assert await worker.residency.put(envelope, nothing(), 5)
        for other in others[:4]:  # which evict each other
            await worker.residency.ensure(other, 5)
        await worker.on_disk(*others[:4])
        assert a in worker.hub.resident
        assert await worker.residency.ensure(a, 5) == 0
        with pytest.raises(AdapterInUse, match="pinned"):
            await worker.residency.evict(a, from_disk=True)
        assert not on_any_disk(worker, a)
        assert a not in worker.reads
        assert worker.value("prelude_worker_adapter_loads_total", source="router", result="ok") == 2
        assert worker.value("prelude_worker_memory_only_adapters") == 1


async def test_one_that_came_from_the_store_is_reported_too(stored: StoredAdapters, worker: Worker):
    """Routers find it by the report: they release the pin, and do not take the revision for lost after a restart."""
    a = stored.ids[0]
    await worker.load(a)  # while it is copied there, it is not evicted
    assert not worker.hub.in_memory_only
    envelope, _ = unstored(stored, a)  # its adapter was deleted, and collected
    await worker.residency.put(envelope, nothing(), 5)
    assert worker.hub.in_memory_only == {a}
    await worker.engine_ends()
    assert (worker.hub.resident, worker.hub.in_memory_only) == (set(), {a})
    await worker.engine.start()
    worker.residency.engine_up()
    # It is reported before its load has ended, and is not evicted until then.
    await until(lambda: worker.hub.resident == {a} and not worker.residency._queue.keys)
    worker.residency.unpin(a)
    is_evicted = False
    while not is_evicted:
        with suppress(AdapterInUse):  # while it is copied from or to the disk: "try again"
            is_evicted = await worker.residency.evict(a, from_disk=True)
        await asyncio.sleep(0.001)
    assert is_empty(worker)


async def test_once_unpinned_and_evicted_it_is_lost(stored: StoredAdapters, tmp_path: Path):
    a, b, c = stored.ids[:3]
    envelope, content = unstored(stored, a)
    async with running_worker(stored, tmp_path, host=2) as worker:
        await worker.residency.put(envelope, sent(content), 5)
        worker.engine.in_use.add(a)
        worker.residency.unpin(a)
        await worker.residency.ensure(b, 5)
        await worker.residency.ensure(c, 5)
        assert worker.hub.resident == {a, c}  # requests used it
        worker.engine.in_use.clear()
        await worker.residency.ensure(c, 5)
        await worker.residency.ensure(b, 5)
        assert worker.hub.resident == {b, c}
        assert worker.hub.in_memory_only == set()
        with pytest.raises(RevisionNotStored):
            await worker.residency.ensure(a, 5)
        with pytest.raises(RevisionNotStored, match="does not have"):
            await worker.residency.pin(a, 5)
        assert not on_any_disk(worker, a)


async def test_a_pin_is_renewed_and_outlives_a_push_that_fails(stored: StoredAdapters, worker: Worker):
    a = stored.ids[0]
    envelope, content = unstored(stored, a)
    await worker.residency.put(envelope, sent(content), 5)
    worker.residency.unpin(a)
    assert not await worker.residency.put(envelope, nothing(), 5)
    worker.residency.unpin(a)
    await worker.residency.pin(a, 5)
    with pytest.raises(AdapterInUse, match="is pinned"):
        await worker.residency.evict(a, from_disk=True)
    await worker.engine_ends()
    with pytest.raises(EngineError):
        await worker.residency.put(envelope, nothing(), 5)
    assert set(worker.residency._host.pins) == {a}
    worker.residency.unpin(a)
    with pytest.raises(EngineError):
        await worker.residency.put(envelope, nothing(), 5)
    assert not worker.residency._host.pins


async def test_content_that_was_not_announced_leaves_nothing(stored: StoredAdapters, tmp_path: Path):
    extra, base = tmp_path / "packed", stored.base
    everywhere = announced(*pack(base, write_random_reft(tmp_path / "everywhere", base, 1, positions="all"), extra))
    other_dtype = announced(*pack(base, write_random_lora(tmp_path / "half", base, 99, rank=8), extra, "bfloat16"))

    a, b = stored.ids[:2]
    envelope, content = unstored(stored, a)
    renamed = replace(envelope, revision_id=b)
    chunked = damaged_in_chunks(stored.packed[a], tmp_path)
    stored.object_of(b).unlink()
    async with running_worker(stored, tmp_path, host=3) as worker:
        for wanted, bytes_sent, error, words in (
            (envelope, content[:-1], AdapterNotReceived, f"expected {len(content)} bytes"),
            (envelope, content[: CHUNK_BYTES * 2], AdapterNotReceived, "received 2000 bytes"),
            (envelope, b"", AdapterNotReceived, "send it again"),
            (envelope, content + b"x", AdapterNotReceived, "more than"),
            (envelope, content[:500] + b"x" + content[501:], AdapterNotReceived, "SHA-256"),
            (*chunked, AdapterNotReceived, "is damaged.*SHA-256"),
            (replace(envelope, content_sha256="0" * 64), content, AdapterNotReceived, "SHA-256"),
            (renamed, content, AdapterMalformed, f"{b} holds {a}"),
            (*other_dtype, AdapterIncompatible, "bfloat16"),
            (*everywhere, AdapterUnsupported, "only a unified worker"),
            (replace(envelope, revision_id="sha256:1"), content, InvalidReference, "not a revision id"),
            (replace(envelope, content_bytes=10**12), content, PinsExceedBudget, "move aliases away from others"),
        ):
            with pytest.raises(error, match=words):
                await worker.residency.put(wanted, sent(bytes_sent), 5)
            assert is_empty(worker), (error, words)
        assert worker.engine.calls == []
        await worker.residency.put(envelope, sent(content), 5)
        assert worker.engine.held[a].path.read_bytes() == content


async def test_a_cancelled_push_leaves_nothing(stored: StoredAdapters, worker: Worker):
    a = stored.ids[0]
    envelope, content = unstored(stored, a)
    gate = asyncio.Event()
    for _ in range(3):
        putting = asyncio.create_task(worker.residency.put(envelope, sent(content, gate), 5))
        await until(lambda: worker.host_bytes() >= len(content) // 2 - CHUNK_BYTES)
        putting.cancel()
        await asyncio.wait([putting])
        assert putting.cancelled()
        assert is_empty(worker)
    with pytest.raises(TimeoutError):
        await worker.residency.put(envelope, sent(content, gate), 0.2)
    assert is_empty(worker)
    # Cancelled during the engine's load, the complete adapter stays in memory until it is evicted.
    worker.engine.may_answer.clear()
    putting = asyncio.create_task(worker.residency.put(envelope, sent(content), 5))
    await until(lambda: worker.engine.num_loading == 1)
    putting.cancel()
    await asyncio.wait([putting])
    worker.engine.may_answer.set()
    assert not worker.residency._host.pins
    assert await worker.residency.evict(a, from_disk=True)
    assert is_empty(worker)


async def test_no_room(stored: StoredAdapters, tmp_path: Path):
    a, b, c = stored.ids[:3]
    envelope, content = unstored(stored, a)
    async with running_worker(stored, tmp_path, host=2) as worker:
        await worker.residency.ensure(b, 5)
        await worker.residency.ensure(c, 5)
        worker.engine.in_use.update((b, c))
        with pytest.raises(HostMemoryFull, match="in use, leased or pinned"):
            await worker.residency.put(envelope, sent(content), 0.3)
        assert worker.hub.resident == {b, c}
        worker.engine.in_use.clear()
        await worker.residency.pin(b, 5)
        await worker.residency.pin(c, 5)
        with pytest.raises(PinsExceedBudget):
            await worker.residency.put(envelope, sent(content), 5)
        worker.residency.unpin(b)
        await worker.residency.put(envelope, sent(content), 5)
        assert worker.hub.resident == {a, c}


async def test_a_revision_is_received_or_loaded_but_not_both_at_once(stored: StoredAdapters, tmp_path: Path):
    a = stored.ids[0]
    envelope, content = announced(a, stored.packed[a])  # which the store has, too
    async with running_worker(stored, tmp_path, lease_s=0.01) as worker:
        gate = asyncio.Event()
        putting = asyncio.create_task(worker.residency.put(envelope, sent(content, gate), 5))
        await until(lambda: worker.host_bytes() > 0)
        loading = [asyncio.create_task(worker.residency.ensure(a, 5)) for _ in range(3)]
        other = asyncio.create_task(worker.residency.put(envelope, nothing(), 5))
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in (*loading, other))
        gate.set()
        await asyncio.gather(putting, other, *loading)
        assert (worker.reads, worker.engine.calls) == ([], [("load", a)])

        worker.residency.unpin(a)
        await asyncio.sleep(0.02)
        assert await worker.residency.evict(a, from_disk=True)
        worker.engine.may_answer.clear()
        load = asyncio.create_task(worker.residency.ensure(a, 5))
        await until(lambda: worker.engine.num_loading == 1)
        putting = asyncio.create_task(worker.residency.put(envelope, nothing(), 5))
        await asyncio.sleep(0.05)
        worker.engine.may_answer.set()
        await asyncio.gather(load, putting)
        assert worker.reads == [a]
        assert worker.engine.calls[2:] == [("load", a)]  # after the first load and the eviction
        assert set(worker.residency._host.pins) == {a}
        assert len(worker.residency._host) == 1
        assert worker.hub.in_memory_only == {a}  # it came from the store, and its pin is one of a push


@pytest.mark.parametrize("how", ["refused", "removed"])
async def test_a_lost_revision_is_not_retried_forever(stored: StoredAdapters, worker: Worker, monkeypatch, how: str):
    monkeypatch.setattr(residency, "_PIN_RETRY_S", 0.05)

    a, b = stored.ids[:2]
    envelope, content = unstored(stored, a)
    await worker.residency.put(envelope, sent(content), 5)
    await worker.residency.ensure(b, 5)
    await worker.residency.pin(b, 5)
    await worker.engine_ends()
    if how == "refused":
        worker.engine.refused[a] = "no"
    else:
        shutil.rmtree(worker.residency._host.get(a).directory)  # type: ignore[union-attr]
    await worker.engine.start()
    worker.residency.engine_up()
    await until(lambda: set(worker.residency._host.pins) == {b})
    await until(lambda: worker.hub.resident == {b})
    assert worker.hub.in_memory_only == set()
    num_calls = len(worker.engine.calls)
    await asyncio.sleep(0.3)
    assert len(worker.engine.calls) == num_calls
    assert not worker.residency._pins_due.is_set()


async def test_a_file_of_this_host_is_taken_and_never_written_over(stored: StoredAdapters, tmp_path: Path):
    """Other workers and the router may have it, too."""
    a, *others = stored.ids
    envelope, content = unstored(stored, a)
    (path := tmp_path / "pushed").write_bytes(content)
    (tmp_path / "memory").mkdir()
    async with running_worker(stored, tmp_path, host=2, shared_memory=tmp_path / "memory") as worker:
        await worker.residency.put(envelope, nothing(), 5, str(path))
        assert worker.engine.held[a].path.samefile(path)
        worker.residency.unpin(a)
        for other in others[:3]:  # each over one that was evicted
            await worker.load(other)
        assert a not in worker.hub.resident
        assert path.read_bytes() == content


async def test_another_file_at_that_path_is_not_taken(stored: StoredAdapters, tmp_path: Path):
    a, b = stored.ids[:2]
    envelope, content = unstored(stored, a)
    (longer := tmp_path / "longer").write_bytes(content + b"x")
    (other := tmp_path / "other").write_bytes(stored.packed[b].read_bytes())
    (linked := tmp_path / "linked").symlink_to(stored.packed[a])
    (tmp_path / "memory").mkdir()
    async with running_worker(stored, tmp_path, shared_memory=tmp_path / "memory") as worker:
        with pytest.raises(AdapterNotReceived, match="expected content with SHA-256"):
            await worker.residency.put(envelope, sent(content), 5, str(other))
        assert is_empty(worker)
        for path in (longer, linked, tmp_path, tmp_path / "none"):
            await worker.residency.put(envelope, sent(content), 5, str(path))
            held = worker.engine.held[a].path
            assert held.read_bytes() == content
            assert held.stat().st_nlink == 1
            worker.residency.unpin(a)
            await worker.residency.evict(a, from_disk=False)
        assert is_empty(worker)


async def test_a_file_of_this_host_that_finds_no_folder_leaves_nothing(stored: StoredAdapters, tmp_path: Path):
    """As where the agent is out of descriptors. A link would keep the memory of each such push."""
    envelope, content = unstored(stored, stored.ids[0])
    (path := tmp_path / "pushed").write_bytes(content)
    (tmp_path / "memory").mkdir()
    async with running_worker(stored, tmp_path, shared_memory=tmp_path / "memory") as worker:
        (worker.shared / f"{folder_of(stored.ids[0])}.1").mkdir()  # its own
        with pytest.raises(FileExistsError):
            await worker.residency.put(envelope, nothing(), 5, str(path))
        assert is_empty(worker)
        assert path.stat().st_nlink == 1
