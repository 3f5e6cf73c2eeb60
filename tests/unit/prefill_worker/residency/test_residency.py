"""Loads of a worker: from the store or disk into host memory and the engine."""

import asyncio
import json
import random
import threading
from pathlib import Path

import pytest
from support.adapters.held_adapters import (
    TRUSTS_EVERYBODY,
    StoredAdapters,
    Worker,
    bytes_at_one_moment,
    pack,
    running_worker,
    until,
)
from support.adapters.random_adapters import write_random_expert_lora, write_random_lora, write_random_reft
from support.adapters.tiny_model import TINY_QWEN3_MOE, write_model_config
from support.calls import Calls

from adapters.errors import AdapterError, AdapterIncompatible, AdapterMalformed, AdapterUnsupported, InvalidReference
from adapters.formats import Limits
from adapters.model.base_model import BaseModel
from adapters.store import RevisionNotStored, StoreCorrupt, StoreUnavailable
from engine.errors import EngineError
from prefill_worker.residency import Acceptance


async def test_a_cold_adapter_becomes_resident(stored: StoredAdapters, tmp_path: Path):
    first, second = stored.ids[:2]
    async with running_worker(stored, tmp_path, lease_s=7.0) as worker:
        assert await worker.residency.ensure(first, 5) > 0
        assert worker.hub.resident == {first}
        held = worker.engine.held[first]
        held.check_digest()
        config = json.loads((held.path.parent / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (8, 8)
        expected = {"revision_id": first, "dtype": "float32", "positions": "prefill", "memory_only": False}
        assert config["prelude"] == expected

        assert await worker.residency.ensure(first, 5) == 0.0
        assert worker.engine.calls == [("load", first)]
        await worker.residency.ensure(second, 5)
        assert worker.hub.resident == {first, second}
        await worker.on_disk(first, second)
        assert worker.reads == [first, second]
        assert worker.value("prelude_worker_adapter_lease_hits_total") == 1
        assert worker.value("prelude_worker_adapter_loads_total", source="store", result="ok") == 2


async def test_a_resident_one_costs_few_calls(stored: StoredAdapters, worker: Worker):
    await worker.residency.ensure(stored.ids[0], 5)
    with Calls() as calls:
        for _ in range(100):
            await worker.residency.ensure(stored.ids[0], 5)
    assert calls.number <= 12 * 100


async def test_a_load_that_nobody_waits_for_leaves_nothing(stored: StoredAdapters, worker: Worker):
    """Abandoned at once or during the engine's load, it leaves no reservation and can be loaded again."""
    for number in range(40):
        waiting = asyncio.create_task(worker.residency.ensure(stored.ids[0], 5))
        await asyncio.sleep(number * 0.0005)
        waiting.cancel()
        await asyncio.wait([waiting])
        await until(lambda: not worker.residency._queue.keys)
        if entry := worker.residency._host.get(stored.ids[0]):
            assert entry.packed.is_file()
        await worker.residency.ensure(stored.ids[0], 5)
        await until(lambda: not worker.residency._to_disk)
        assert await worker.residency.evict(stored.ids[0], from_disk=False)
        assert worker.residency._host.used_bytes == 0


async def test_an_unsupported_adapter_is_read_once(stored: StoredAdapters, tmp_path: Path):
    """LoRA on experts can be gigabytes: a second request must not read it or evict for it again."""
    directory = write_random_reft(tmp_path / "everywhere", stored.base, 1, positions="all")
    revision_id = stored.add(directory)

    async with running_worker(stored, tmp_path, host=2) as worker:
        for _ in range(3):
            with pytest.raises(AdapterUnsupported, match="acts on 'all' positions"):
                await worker.residency.ensure(revision_id, 5)
        assert worker.reads.count(revision_id) == 1
        for each in stored.ids[:2]:
            await worker.residency.ensure(each, 5)
        with pytest.raises(AdapterUnsupported, match="acts on 'all' positions"):
            await worker.residency.ensure(revision_id, 5)
        assert worker.hub.resident == set(stored.ids[:2])


async def test_what_a_worker_cannot_serve_is_refused_with_the_reason(stored: StoredAdapters, tmp_path: Path):
    wide = stored.add(write_random_lora(tmp_path / "wide", stored.base, 50, rank=32))
    down = stored.add(write_random_lora(tmp_path / "down", stored.base, 51, modules=["down_proj"]))
    half = stored.add(write_random_lora(tmp_path / "half", stored.base, 52), dtype="bfloat16")
    strange_base = BaseModel.read(write_model_config(tmp_path / "other", vocab_size=100))
    foreign, path = pack(
        strange_base, write_random_lora(tmp_path / "foreign", strange_base, 53, modules=["q_proj"]), tmp_path / "packed"
    )
    stored.store.publish(foreign, path)
    swapped = "sha256:" + "ab" * 32
    stored.store.publish(swapped, path)
    cases = {
        wide: (AdapterIncompatible, "rank 32, this worker takes at most 16"),
        down: (AdapterIncompatible, "adapts down_proj, this worker only qkv_proj"),
        half: (AdapterIncompatible, "stored in bfloat16, this cluster serves float32"),
        foreign: (AdapterIncompatible, f"^{foreign} was packed for the base model .*; import an adapter that was"),
        swapped: (AdapterMalformed, f"holds {foreign}"),
        "sha256:" + "0" * 64: (RevisionNotStored, "the adapter store has no sha256:0+; import the adapter again"),
        "sha256:../../etc": (InvalidReference, "is not a revision id"),
    }

    limits = Limits(max_rank=16, target_modules=("q_proj",))
    async with running_worker(stored, tmp_path, limits=limits) as worker:
        for revision_id, (error, words) in cases.items():
            with pytest.raises(error, match=words):
                await worker.residency.ensure(revision_id, 5)
        assert worker.engine.calls == []
        assert worker.folders() == []
        labels = {"source": "store", "result": "adapter_incompatible"}
        assert worker.value("prelude_worker_adapter_loads_total", **labels) == 4


def prepare(tmp_path, limits=Limits(), **options) -> dict:
    """Prepare a LoRA on experts for an engine; what the engine is told."""
    base = BaseModel.read(write_model_config(tmp_path / "model", **TINY_QWEN3_MOE))
    revision_id, path = pack(base, write_random_expert_lora(tmp_path / "lora", base, 1, **options), tmp_path / "packed")
    acceptance = Acceptance(base, "float32", limits, frozenset({"prefill"}), TRUSTS_EVERYBODY)
    acceptance.prepare(revision_id, path)
    return json.loads((path.parent / "adapter_config.json").read_text())


def test_experts_are_taken_up_to_their_rank(tmp_path):
    with pytest.raises(AdapterUnsupported, match="LoRA on experts, which is imported and packed, but not applied by"):
        prepare(tmp_path, attention=["q_proj"], experts=[2])
    with pytest.raises(AdapterUnsupported, match="rank 5 on experts, and workers take at most 4"):
        prepare(tmp_path, Limits(max_expert_rank=4), rank=5)
    assert not (tmp_path / "packed" / "adapter_config.json").exists()
    config = prepare(tmp_path, Limits(max_expert_rank=4), rank=4, modules=["gate_proj"])
    assert (config["r"], config["target_modules"]) == (4, ["gate_proj", "up_proj"])


def test_experts_projections_are_limited_too(tmp_path):
    limits = Limits(max_expert_rank=4, target_modules=("q_proj", "gate_proj"))
    with pytest.raises(AdapterIncompatible, match=r"adapts down_proj_moe, this worker only gate_up_proj.*target_modul"):
        prepare(tmp_path, limits, modules=["down_proj"])


async def test_a_damaged_object_in_the_store_is_refused_and_can_be_repaired(stored: StoredAdapters, worker: Worker):
    victim = stored.ids[0]
    data = stored.object_of(victim).read_bytes()
    claims = (data[:80] + size.to_bytes(8, "little") + data[88:] for size in (0, 5, 1 << 62))
    for damaged in (data[:-1] + bytes([data[-1] ^ 1]), data + b"more", *claims):
        stored.object_of(victim).write_bytes(damaged)
        with pytest.raises(StoreCorrupt):
            await worker.residency.ensure(victim, 5)
    await worker.residency.ensure(stored.ids[1], 5)
    stored.object_of(victim).write_bytes(data)
    await worker.residency.ensure(victim, 5)


async def test_a_store_outage(stored: StoredAdapters, worker: Worker):
    resident, on_disk, cold = stored.ids[:3]
    await worker.residency.ensure(resident, 5)
    await worker.put_on_disk(on_disk)
    stored.move_away()
    try:
        assert await worker.residency.ensure(resident, 5) == 0
        await worker.residency.ensure(on_disk, 5)
        with pytest.raises(StoreUnavailable):
            await worker.residency.ensure(cold, 0.5)
        waiting = asyncio.create_task(worker.residency.ensure(cold, 20))
        await asyncio.sleep(0.4)
        assert not waiting.done()
    finally:
        stored.move_back()
    await waiting
    assert worker.hub.resident == {resident, on_disk, cold}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
async def test_random_operations_keep_the_budgets(stored: StoredAdapters, tmp_path: Path, seed: int):
    """Files in shared memory and on disk never exceed the budgets."""
    chance = random.Random(seed)
    host, disk = chance.randint(2, 5), chance.randint(1, 6)
    too_much: list[str] = []

    def watch(worker: Worker, stop: threading.Event) -> None:
        while not stop.is_set():
            for folder, may in ((worker.shared, host * stored.room), (worker.disk, disk * stored.object_bytes)):
                if (found := bytes_at_one_moment(folder)) > may:
                    too_much.append(f"{folder} {found} > {may}")

    async def one(worker: Worker) -> None:
        revision_id = chance.choice(stored.ids)
        await asyncio.sleep(chance.uniform(0, 1))
        try:
            match chance.randrange(9):
                case 0:
                    await worker.residency.pin(revision_id, 1)
                    await asyncio.sleep(0.1)
                    worker.residency.unpin(revision_id)
                case 1:
                    await worker.residency.evict(revision_id, from_disk=chance.random() < 0.5)
                case 2:
                    worker.engine.in_use ^= set(worker.engine.held) & {revision_id}
                case 3:
                    await asyncio.wait_for(worker.residency.ensure(revision_id, 5), chance.uniform(0, 0.05))
                case 4 if chance.random() < 0.15:
                    await worker.new_engine()
                case _:
                    await worker.residency.ensure(revision_id, 3, is_prewarm=chance.random() < 0.2)
        except (AdapterError, EngineError, TimeoutError):
            pass

    async with running_worker(stored, tmp_path, host=host, disk=disk) as worker:
        stop = threading.Event()
        watching = asyncio.get_running_loop().run_in_executor(None, watch, worker, stop)
        try:
            await asyncio.gather(*(one(worker) for _ in range(150)))
        finally:
            stop.set()
            await watching
        worker.engine.in_use.clear()
        assert not too_much, (seed, too_much[:5])
        assert worker.hub.resident <= set(worker.engine.held), seed
        for each in stored.ids:  # and everything still works
            await worker.residency.ensure(each, 10)
        assert worker.hub.resident == set(worker.engine.held), seed
        for held in worker.engine.held.values():
            held.check_digest()
        await asyncio.get_running_loop().shutdown_default_executor()


async def test_the_gauges(stored: StoredAdapters, tmp_path: Path):
    a, b, c = stored.ids[:3]
    async with running_worker(stored, tmp_path, host=7, disk=9) as worker:
        await worker.load(a)
        await worker.put_on_disk(b)
        prefix = "prelude_worker_adapter"
        assert worker.value(f"{prefix}_tier_bytes", tier="host") == stored.room
        assert worker.value(f"{prefix}_tier_budget_bytes", tier="host") == 7 * stored.room
        assert worker.value(f"{prefix}_tier_bytes", tier="disk") == 2 * stored.object_bytes
        assert worker.value(f"{prefix}_tier_adapters", tier="disk") == 2
        assert worker.value("prelude_worker_resident_adapters") == 1
        for stage in ("room", "fetch", "check", "engine", "disk_write"):
            assert worker.value(f"{prefix}_load_stage_seconds_count", stage=stage) >= 1, stage
        worker.engine.may_answer.clear()
        waiting = [asyncio.create_task(worker.residency.ensure(c, 5)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert worker.value(f"{prefix}_load_waiters") == 3
        assert worker.value(f"{prefix}_loads_running") == 1
        worker.engine.may_answer.set()
        await asyncio.gather(*waiting)
