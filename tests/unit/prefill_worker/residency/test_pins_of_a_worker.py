"""Pins in a running worker: they keep adapters resident, also while other calls for them fail."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.adapters.held_adapters import (
    StoredAdapters,
    eventually,
    running_worker,
)

from adapters.errors import (
    AdapterError,
)
from adapters.store import RevisionNotStored
from engine.errors import EngineUnreachable
from prefill_worker.residency.errors import (
    AdapterInUse,
    HostMemoryFull,
    PinsExceedBudget,
)


async def test_pinned_ones_stay(stored: StoredAdapters, tmp_path: Path):
    a, b, c, d = stored.ids[:4]
    async with running_worker(stored, tmp_path, host=3) as worker:
        await worker.residency.pin(a, 5)
        await worker.residency.pin(a, 5)  # idempotent
        for each in (b, c, d, b, c, d):
            await worker.residency.ensure(each, 5)
            assert a in worker.hub.resident
        with pytest.raises(AdapterInUse, match="pinned"):
            await worker.residency.evict(a, from_disk=True)
        await worker.residency.pin(b, 5)
        await worker.residency.pin(c, 5)
        with pytest.raises(PinsExceedBudget, match="unpin others or raise it"):
            await worker.residency.pin(d, 5)
        with pytest.raises(HostMemoryFull):
            await worker.residency.ensure(d, 0.3)
        worker.residency.unpin(a)
        worker.residency.unpin(a)
        await worker.on_disk(a, b, c)
        await worker.residency.ensure(d, 5)
        assert worker.hub.resident == {b, c, d}
        with pytest.raises(RevisionNotStored):
            await worker.residency.pin("sha256:" + "0" * 64, 5)
        assert set(worker.residency._host.pins) == {b, c}
        stored.object_of(stored.ids[5]).write_bytes(b"broken" * 100)
        worker.residency.unpin(b)
        with pytest.raises(AdapterError):
            await worker.residency.pin(stored.ids[5], 5)
        assert set(worker.residency._host.pins) == {c}


@pytest.mark.parametrize("deadline_s", [0.1, 0.3])
async def test_a_pin_outlives_an_overlapping_one_that_fails(stored: StoredAdapters, tmp_path: Path, deadline_s: float):
    """Of two calls for a new revision the one with the earlier deadline fails."""

    a, b = stored.ids[:2]
    async with running_worker(stored, tmp_path, host=1) as worker:
        worker.engine.may_answer.clear()
        short = asyncio.create_task(worker.residency.pin(a, 0.2))
        await asyncio.sleep(0.05)
        long = asyncio.create_task(worker.residency.pin(a, 5))
        await asyncio.sleep(deadline_s)
        if deadline_s > 0.2:
            await asyncio.wait([short])
            assert isinstance(short.exception(), TimeoutError)
        worker.engine.may_answer.set()
        await asyncio.gather(short, long, return_exceptions=True)
        assert long.exception() is None
        with pytest.raises(AdapterInUse, match="is pinned"):
            await worker.residency.evict(a, from_disk=False)
        await worker.engine_ends()
        with pytest.raises(EngineUnreachable):
            await worker.residency.pin(a, 5)
        assert set(worker.residency._host.pins) == {a}  # as before
        await worker.engine.start()
        worker.residency.engine_up()
        await eventually(lambda: worker.hub.resident == {a})
        worker.residency.unpin(a)
        await worker.on_disk(a)
        await worker.residency.ensure(b, 5)


@pytest.mark.parametrize("is_unpinned", [True, False])
async def test_a_pin_holds_while_an_overlapping_one_fails(stored: StoredAdapters, tmp_path: Path, is_unpinned: bool):
    """Also while the earlier pin of an operator is released."""

    a, b = stored.ids[:2]
    async with running_worker(stored, tmp_path, host=1) as worker:
        await worker.residency.pin(a, 5)
        await worker.engine_ends()
        await worker.engine.start()
        worker.engine.may_answer.clear()
        calls = [asyncio.create_task(worker.residency.pin(a, deadline_s)) for deadline_s in (0.1, 5, 5)]
        await asyncio.wait(calls[:1])
        assert isinstance(calls[0].exception(), TimeoutError)
        if is_unpinned:
            worker.residency.unpin(a)
        calls[2].cancel()
        await asyncio.wait(calls[2:])
        with pytest.raises(PinsExceedBudget):  # its room is still taken
            await worker.residency.pin(b, 5)
        worker.engine.may_answer.set()
        await calls[1]
        assert worker.residency._pins == {a: {""}}
        worker.residency.unpin(a)
        assert worker.residency._pins == {}
