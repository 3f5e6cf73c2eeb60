"""Residency when the engine ends, restarts, loses an adapter or refuses one."""

import asyncio
from pathlib import Path

import pytest
from support.adapters.held_adapters import StoredAdapters, Worker, running_worker, until

from engine.errors import EngineUnreachable
from prefill_worker.residency.errors import AdapterRefusedByEngine


async def test_an_abandoned_engine_load_is_unloaded_on_eviction(stored: StoredAdapters, tmp_path: Path):
    async with running_worker(stored, tmp_path, host=1) as worker:
        first, second = stored.ids[:2]
        worker.engine.may_answer.clear()
        with pytest.raises(TimeoutError):
            await worker.residency.ensure(first, 0.3)
        assert worker.hub.resident == set()
        worker.engine.may_answer.set()
        await until(lambda: first in worker.engine.held)
        await worker.residency.ensure(second, 5)
        assert set(worker.engine.held) == {second}


async def test_an_adapter_that_the_engine_lost_is_reloaded_once_reported(stored: StoredAdapters, worker: Worker):
    a = stored.ids[0]
    await worker.residency.ensure(a, 5)
    worker.engine.held.clear()
    assert await worker.residency.ensure(a, 5) == 0
    assert set(worker.engine.held) == set()  # which the worker cannot know
    assert await worker.residency.ensure(a, 5, not_in_engine=True) > 0
    assert set(worker.engine.held) == worker.hub.resident == {a}
    assert worker.reads == [a]
    await worker.residency.ensure(a, 5, not_in_engine=True)  # harmless if the engine does hold it
    assert set(worker.engine.held) == worker.hub.resident == {a}
    await worker.residency.ensure(stored.ids[1], 5, not_in_engine=True)


async def test_pinned_adapters_are_retried_until_the_engine_loads_them(
    stored: StoredAdapters, worker: Worker, monkeypatch
):
    from prefill_worker.residency import residency

    monkeypatch.setattr(residency, "_PIN_RETRY_S", 0.05)

    pinned = stored.ids[0]
    await worker.residency.ensure(pinned, 5)
    await worker.residency.pin(pinned, 5)
    await worker.engine_ends()
    worker.residency.engine_up()  # reported before it answers
    await asyncio.sleep(0.2)
    await worker.engine.start()
    await until(lambda: worker.hub.resident == {pinned})


async def test_an_engine_that_ends_during_a_load(stored: StoredAdapters, worker: Worker):
    a = stored.ids[0]
    worker.engine.may_answer.clear()
    waiting = asyncio.create_task(worker.residency.ensure(a, 5))
    await until(lambda: worker.engine.calls)
    worker.residency.engine_gone()
    worker.engine.may_answer.set()  # its answer comes too late
    with pytest.raises(EngineUnreachable, match="ended while"):
        await waiting
    assert worker.hub.resident == set()
    worker.engine.held.clear()
    await worker.residency.ensure(a, 5)
    assert worker.reads == [a]


async def test_an_adapter_refused_by_the_engine_leaves_memory(stored: StoredAdapters, worker: Worker):
    a, b = stored.ids[:2]
    worker.engine.refused[a] = "the rank is too large"
    with pytest.raises(AdapterRefusedByEngine, match=f"does not take {a}: the rank is too large") as caught:
        await worker.residency.ensure(a, 5)
    assert (caught.value.code, caught.value.http_status) == ("adapter_refused_by_engine", 422)
    [folder] = worker.engine.refused_folders
    assert str(folder) not in str(caught.value)
    assert worker.folders() == []
    await worker.residency.ensure(b, 5)
