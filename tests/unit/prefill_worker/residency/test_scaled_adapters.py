"""A revision at several scales: one object in the store and on the disk, an adapter of its own everywhere else."""

from pathlib import Path

import numpy as np
import pytest
from support.adapters.held_adapters import StoredAdapters, Worker, running_worker
from support.adapters.random_adapters import write_random_lora, write_random_reft

from adapters.errors import AdapterIncompatible, InvalidReference
from adapters.identity import scaled_id
from prefill_worker.residency.errors import AdapterInUse


def check_scaled(worker: Worker, revision_id: str, scale: float) -> None:
    """The engine holds the store's factors, B times the scale."""
    held = worker.engine.held[scaled_id(revision_id, scale)]
    own = worker.engine.held[revision_id]
    own.check_digest()
    assert held.metadata == own.metadata
    for name, tensor in own.tensors.items():
        wanted = tensor * np.float32(scale) if name.endswith(".b") else tensor
        assert np.array_equal(held.tensors[name], wanted), name


async def test_each_scale_is_an_adapter_of_its_own(stored: StoredAdapters, tmp_path: Path):
    reft = stored.add(write_random_reft(tmp_path / "reft", stored.base, 1, kind="loreft"))
    async with running_worker(stored, tmp_path) as worker:
        for revision_id in (stored.ids[0], reft):
            names = [scaled_id(revision_id, scale) for scale in (0.5, 1.0, 1.85)]
            for name in names:
                assert await worker.residency.ensure(name, 5) > 0
            for name in names:
                assert await worker.residency.ensure(name, 5) == 0.0
            assert worker.hub.resident >= set(names)
            assert len({worker.engine.held[name].path.parent for name in names}) == 3
            for scale in (0.5, 1.85):
                check_scaled(worker, revision_id, scale)
        await worker.on_disk(stored.ids[0], reft)
        assert worker.hub.on_disk == {stored.ids[0], reft}


async def test_a_disk_and_an_engine_s_restart_scale_once(stored: StoredAdapters, tmp_path: Path):
    async with running_worker(stored, tmp_path) as worker:
        one, half = stored.ids[0], scaled_id(stored.ids[0], 0.5)
        await worker.put_on_disk(one)
        reads = len(worker.reads)
        for _ in range(2):
            await worker.residency.ensure(half, 5)
            await worker.residency.ensure(one, 5)
            check_scaled(worker, one, 0.5)
            await worker.new_engine()
            assert worker.hub.resident == set()
        assert await worker.residency.ensure(half, 5) > 0
        assert await worker.residency.evict(one, from_disk=False)
        assert await worker.residency.ensure(half, 5) > 0  # into a folder that another adapter may have had
        await worker.residency.ensure(one, 5)
        check_scaled(worker, one, 0.5)
        assert len(worker.reads) == reads
        assert worker.hub.on_disk == {one}


async def test_an_eviction_takes_all_scales(stored: StoredAdapters, tmp_path: Path):
    one, other = stored.ids[:2]
    async with running_worker(stored, tmp_path) as worker:
        scaled = [scaled_id(one, scale) for scale in (0.05, 0.5, 1.0)]
        for name in (*scaled, other, scaled_id(other, 0.5)):
            await worker.residency.ensure(name, 5)
        await worker.on_disk(one, other)
        assert await worker.residency.evict(one, from_disk=True)
        assert worker.hub.resident == {other, scaled_id(other, 0.5)}
        assert worker.hub.on_disk == {other}
        assert not await worker.residency.evict(one, from_disk=True)
        await worker.residency.ensure(scaled[1], 5)
        assert await worker.residency.evict(one, from_disk=False)  # where it is at a scale alone
    async with running_worker(stored, tmp_path, lease_s=600) as worker:
        await worker.residency.ensure(scaled[1], 5)
        with pytest.raises(AdapterInUse, match=f"{scaled[1]} is leased"):
            await worker.residency.evict(one, from_disk=False)


async def test_scales_take_room_and_the_least_recently_used_goes(stored: StoredAdapters, tmp_path: Path):
    async with running_worker(stored, tmp_path, host=2) as worker:
        names = [scaled_id(stored.ids[0], steps / 20) for steps in range(1, 6)]
        for name in names:
            await worker.residency.ensure(name, 5)
        assert names[-1] in worker.hub.resident
        assert len(worker.hub.resident) <= 2


@pytest.mark.parametrize("scale", ["x1", "x0", "x0.07", "x9", "x0.5/../..", "x"])
async def test_no_other_scale_is_loaded(stored: StoredAdapters, worker: Worker, scale: str):
    with pytest.raises(InvalidReference, match="perhaps with a scale"):
        await worker.residency.ensure(stored.ids[0] + scale, 5)
    for call in (worker.residency.evict(f"{stored.ids[0]}x0.5", from_disk=True), worker.residency.ensure("", 5)):
        with pytest.raises(InvalidReference):
            await call
    assert worker.reads == []


async def test_what_does_not_fit_at_a_scale_leaves_nothing(stored: StoredAdapters, tmp_path: Path):
    large = stored.add(write_random_lora(tmp_path / "large", stored.base, 7, std=7e37, alpha=8))
    async with running_worker(stored, tmp_path) as worker:
        with pytest.raises(AdapterIncompatible, match="at adapter_scale 2 has a value of"):
            await worker.residency.ensure(scaled_id(large, 2), 5)
        assert worker.folders() == []
        await worker.residency.ensure(scaled_id(large, 0.5), 5)
