"""Single tiers: a disk cache while files are read, and memory use and bounds of copies."""

from __future__ import annotations

import hashlib
import tracemalloc
from io import FileIO
from pathlib import Path

import pytest
from support.adapters.held_adapters import StoredAdapters

from adapters.store import Envelope, StoreCorrupt
from adapters.store.envelope import content_of
from prefill_worker.residency.errors import AdapterInUse, DiskCacheFull
from prefill_worker.residency.threads import Stop, WorkThreads
from prefill_worker.residency.tiers.disk_cache import DiskCache
from prefill_worker.residency.tiers.objects import checked_content, write_content

REVISION_ID = "sha256:" + "ab" * 32


async def test_a_file_that_is_read_stays(stored: StoredAdapters, tmp_path: Path):
    a, b = stored.ids[:2]
    threads = WorkThreads(1)
    changes: list[tuple[list[str], list[str]]] = []
    cache = DiskCache(
        tmp_path / "disk",
        stored.object_bytes,
        threads,
        changed=lambda come, gone: changes.append((come, gone)),
        on_evicted=lambda: None,
        on_delete_failed=lambda: None,
    )
    await cache.open()

    async def write(revision_id: str) -> None:
        content_bytes = stored.object_bytes - 88
        await cache.write(revision_id, content_bytes, lambda: stored.store.begin_read(revision_id)[1])

    await write(a)
    with cache.reading(a) as content:
        with pytest.raises(AdapterInUse, match="being copied to or from the disk"):
            await cache.remove(a)
        with pytest.raises(DiskCacheFull):
            await write(b)
        assert sum(len(part) for part in content if not isinstance(part, Envelope)) == stored.object_bytes - 88
    await write(b)
    assert changes == [([a], []), ([], [a]), ([b], [])]
    assert cache.used_bytes == stored.object_bytes
    await threads.aclose()


@pytest.mark.slow
def test_copies_do_not_hold_the_file_in_memory(tmp_path: Path):
    num_bytes = 96 * 1024**2
    block = bytes(1024**2)
    digest = hashlib.sha256()
    for _ in range(96):
        digest.update(block)
    envelope = Envelope(REVISION_ID, digest.hexdigest(), num_bytes)
    with (tmp_path / "object").open("wb") as file:
        file.write(envelope.encode())
        for _ in range(96):
            file.write(block)
    tracemalloc.start()
    try:
        content = checked_content(tmp_path / "object", REVISION_ID)
        assert write_content(content, FileIO(tmp_path / "copy", "xb"), num_bytes, Stop(), as_object=True) == envelope
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
