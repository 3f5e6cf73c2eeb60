"""Adapters come to a worker: from the store and the disk into host memory and its engine."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import json
import random
import resource
import shutil
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.engine_stand_in import engine_stand_in
from support.held_adapters import (
    StoredAdapters,
    Worker,
    bytes_at_one_moment,
    eventually,
    pack,
    reft_directory,
    running_worker,
)

from adapters.errors import (
    AdapterError,
    AdapterIncompatible,
    AdapterMalformed,
    AdapterTooLarge,
    AdapterUnsupported,
    InvalidReference,
)
from adapters.formats import Limits
from adapters.store import RevisionNotStored, StoreCorrupt, StoreUnavailable
from engine.errors import EngineError, EngineUnreachable
from prefill_worker.residency import Tier
from prefill_worker.residency.errors import (
    AdapterInUse,
    AdapterRefusedByEngine,
    DiskCacheFull,
    HostMemoryFull,
    LoadQueueFull,
    PinsExceedBudget,
)
from prefill_worker.residency.tiers import disk_cache
from prefill_worker.residency.tiers.pins import PinOwner
from samples.random_adapters import write_random_lora


def test_a_cold_adapter_becomes_resident(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        first, second = stored.ids[:2]
        async with running_worker(stored, tmp_path, lease_s=7.0) as worker:
            ensured = await worker.residency.ensure(first, Tier.HOST, 5)
            assert ensured.load_s > 0
            assert ensured.lease_s == 7.0
            assert worker.hub.resident == {first}
            held = worker.engine.held[first]
            held.check_digest()
            config = json.loads((held.path.parent / "adapter_config.json").read_text())
            assert (config["r"], config["lora_alpha"]) == (8, 8)
            assert config["prelude"] == {"revision_id": first, "dtype": "float32", "positions": "prefill"}

            assert (await worker.residency.ensure(first, Tier.HOST, 5)).load_s == 0.0
            assert worker.engine.calls == [("load", first)]
            await worker.residency.ensure(second, Tier.HOST, 5)
            assert worker.hub.resident == {first, second}
            await worker.on_disk(first, second)
            assert worker.reads == [first, second]
            assert worker.value("prelude_worker_adapter_lease_hits_total") == 1
            assert worker.value("prelude_worker_adapter_loads_total", source="store", result="ok") == 2

    asyncio.run(scenario())


def test_a_resident_one_costs_microseconds(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        async with running_worker(stored, tmp_path) as worker:
            await worker.residency.ensure(stored.ids[0], Tier.HOST, 5)
            began = time.perf_counter()
            for _ in range(1000):
                await worker.residency.ensure(stored.ids[0], Tier.HOST, 5)
            assert (time.perf_counter() - began) / 1000 < 200e-6

    asyncio.run(scenario())


def test_one_load_however_many_wait(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        async with running_worker(stored, tmp_path) as worker:
            await asyncio.gather(*(worker.residency.ensure(stored.ids[0], Tier.HOST, 5) for _ in range(50)))
            assert worker.reads == [stored.ids[0]]
            assert worker.engine.calls == [("load", stored.ids[0])]

    asyncio.run(scenario())


def test_different_adapters_load_at_once_up_to_a_bound(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        async with running_worker(stored, tmp_path, parallel_loads=3, queued_loads=5) as worker:
            worker.engine.load_s = 0.1
            results = await asyncio.gather(
                *(worker.residency.ensure(each, Tier.HOST, 5) for each in stored.ids), return_exceptions=True
            )
            refused = [each for each in results if isinstance(each, LoadQueueFull)]
            assert len(refused) == len(stored.ids) - 8
            assert all(each.retry_after_s > 0 for each in refused)
            assert worker.engine.most_loading == 3
            assert len(worker.hub.resident) == 8

    asyncio.run(scenario())


def test_a_load_that_nobody_waits_for_leaves_nothing(stored: StoredAdapters, tmp_path: Path):
    """Given up in its first milliseconds or while the engine loads: no reservation stays, it can be asked for again."""

    async def scenario() -> None:
        async with running_worker(stored, tmp_path) as worker:
            for number in range(40):
                waiting = asyncio.create_task(worker.residency.ensure(stored.ids[0], Tier.HOST, 5))
                await asyncio.sleep(number * 0.0005)
                waiting.cancel()
                await asyncio.wait([waiting])
                await eventually(lambda: not worker.residency._queue.keys)
                if entry := worker.residency._host.get(stored.ids[0]):
                    assert entry.packed.is_file()
                await worker.residency.ensure(stored.ids[0], Tier.HOST, 5)
                await eventually(lambda: not worker.residency._to_disk)
                assert await worker.residency.evict(stored.ids[0], from_disk=False)
                assert worker.residency._host.used_bytes == 0

    asyncio.run(scenario())


def test_an_engine_load_that_was_given_up_is_undone_on_eviction(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        async with running_worker(stored, tmp_path, host=1) as worker:
            first, second = stored.ids[:2]
            worker.engine.may_answer.clear()
            with pytest.raises(TimeoutError):
                await worker.residency.ensure(first, Tier.HOST, 0.3)
            assert worker.hub.resident == set()
            worker.engine.may_answer.set()
            await eventually(lambda: first in worker.engine.held)
            await worker.residency.ensure(second, Tier.HOST, 5)
            assert set(worker.engine.held) == {second}

    asyncio.run(scenario())


@pytest.mark.parametrize("positions", ["prefill", "all"])
def test_roles_take_the_adapters_that_they_can_apply(stored: StoredAdapters, tmp_path: Path, positions: str):
    revision_id = stored.add(reft_directory(stored.base, tmp_path / "adapter", positions))

    async def scenario() -> None:
        async with running_worker(stored, tmp_path) as worker:
            if positions == "prefill":
                await worker.residency.ensure(revision_id, Tier.HOST, 5)
                return
            with pytest.raises(AdapterUnsupported, match="acts on 'all' positions, which only a unified worker can"):
                await worker.residency.ensure(revision_id, Tier.HOST, 5)
            assert len(worker.residency._host) == 0
        async with running_worker(stored, tmp_path, positions=frozenset({"prefill", "all"})) as worker:
            await worker.residency.ensure(revision_id, Tier.HOST, 5)

    asyncio.run(scenario())


def test_what_is_never_served_costs_others_nothing_when_it_is_asked_for_again(stored: StoredAdapters, tmp_path: Path):
    """It may be gigabytes, as LoRA on experts is: it is read once, and no adapter goes for it again."""
    directory = reft_directory(stored.base, tmp_path / "everywhere", "all")
    revision_id = stored.add(directory)

    async def scenario() -> None:
        async with running_worker(stored, tmp_path, host=2) as worker:
            for _ in range(3):
                with pytest.raises(AdapterUnsupported, match="acts on 'all' positions"):
                    await worker.residency.ensure(revision_id, Tier.HOST, 5)
            assert worker.reads.count(revision_id) == 1
            for each in stored.ids[:2]:
                await worker.residency.ensure(each, Tier.HOST, 5)
            with pytest.raises(AdapterUnsupported, match="acts on 'all' positions"):
                await worker.residency.ensure(revision_id, Tier.HOST, 5)
            assert worker.hub.resident == set(stored.ids[:2])

    asyncio.run(scenario())


def test_what_a_worker_cannot_serve_is_refused_with_the_reason(stored: StoredAdapters, tmp_path: Path):
    wide = stored.add(write_random_lora(tmp_path / "wide", stored.base, 50, rank=32))
    down = stored.add(write_random_lora(tmp_path / "down", stored.base, 51, modules=["down_proj"]))
    half = stored.add(write_random_lora(tmp_path / "half", stored.base, 52), dtype="bfloat16")
    from adapters.model.base_model import BaseModel

    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(
        json.dumps(
            {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48,
             "num_attention_heads": 4, "vocab_size": 100}
        )
    )  # fmt: skip
    strange_base = BaseModel.read(other)
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
        foreign: (AdapterIncompatible, "was packed for the base model"),
        swapped: (AdapterMalformed, f"holds {foreign}"),
        "sha256:" + "0" * 64: (RevisionNotStored, "the adapter store has no sha256:0+; import the adapter again"),
        "sha256:../../etc": (InvalidReference, "is not a revision id"),
    }

    async def scenario() -> None:
        limits = Limits(max_rank=16, target_modules=("q_proj",))
        async with running_worker(stored, tmp_path, limits=limits) as worker:
            for revision_id, (error, words) in cases.items():
                with pytest.raises(error, match=words):
                    await worker.residency.ensure(revision_id, Tier.HOST, 5)
            assert worker.engine.calls == []
            assert worker.folders() == []
            labels = {"source": "store", "result": "adapter_incompatible"}
            assert worker.value("prelude_worker_adapter_loads_total", **labels) == 4

    asyncio.run(scenario())


def test_a_damaged_object_in_the_store_is_refused_and_can_be_repaired(stored: StoredAdapters, tmp_path: Path):
    victim = stored.ids[0]
    data = stored.object_of(victim).read_bytes()

    async def scenario() -> None:
        async with running_worker(stored, tmp_path) as worker:
            stored.object_of(victim).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            with pytest.raises(StoreCorrupt):
                await worker.residency.ensure(victim, Tier.HOST, 5)
            stored.object_of(victim).write_bytes(data + b"more")
            with pytest.raises(StoreCorrupt):
                await worker.residency.ensure(victim, Tier.HOST, 5)
            for size in (0, 5, 1 << 62):  # what the envelope claims
                stored.object_of(victim).write_bytes(data[:80] + size.to_bytes(8, "little") + data[88:])
                with pytest.raises(StoreCorrupt):
                    await worker.residency.ensure(victim, Tier.HOST, 5)
            await worker.residency.ensure(stored.ids[1], Tier.HOST, 5)
            stored.object_of(victim).write_bytes(data)
            await worker.residency.ensure(victim, Tier.HOST, 5)

    asyncio.run(scenario())


def test_the_store_goes_away_and_comes_back(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        resident, on_disk, cold = stored.ids[:3]
        async with running_worker(stored, tmp_path) as worker:
            await worker.residency.ensure(resident, Tier.HOST, 5)
            await worker.residency.ensure(on_disk, Tier.DISK, 5)
            stored.go_away()
            try:
                assert (await worker.residency.ensure(resident, Tier.HOST, 5)).load_s == 0
                await worker.residency.ensure(on_disk, Tier.HOST, 5)
                with pytest.raises(StoreUnavailable):
                    await worker.residency.ensure(cold, Tier.HOST, 0.5)
                waiting = asyncio.create_task(worker.residency.ensure(cold, Tier.HOST, 20))
                await asyncio.sleep(0.4)
                assert not waiting.done()
            finally:
                stored.come_back()
            await waiting
            assert worker.hub.resident == {resident, on_disk, cold}

    asyncio.run(scenario())


def test_least_recently_used_ones_make_room(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a, b, c, d = stored.ids[:4]
        async with running_worker(stored, tmp_path, host=3) as worker:
            for each in (a, b, c, a):
                await worker.residency.ensure(each, Tier.HOST, 5)
            await worker.on_disk(a, b, c)
            await worker.residency.ensure(d, Tier.HOST, 5)
            assert worker.hub.resident == set(worker.engine.held) == {a, c, d}
            assert worker.host_bytes() <= 3 * stored.room
            assert worker.value("prelude_worker_adapter_evictions_total", tier="host") == 1
            await worker.residency.ensure(b, Tier.HOST, 5)
            assert worker.reads.count(b) == 1  # the second time it came from the disk
            assert worker.value("prelude_worker_adapter_loads_total", source="disk", result="ok") == 1

    asyncio.run(scenario())


def test_one_that_requests_use_stays_and_another_one_goes(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a, b, c = stored.ids[:3]
        async with running_worker(stored, tmp_path, host=2) as worker:
            for each in (a, b):
                await worker.residency.ensure(each, Tier.HOST, 5)
            await worker.on_disk(a, b)
            worker.engine.in_use.add(a)
            await worker.residency.ensure(c, Tier.HOST, 5)
            assert worker.hub.resident == set(worker.engine.held) == {a, c}
            worker.engine.held[a].check_digest()
            with pytest.raises(AdapterInUse, match="in use by requests"):
                await worker.residency.evict(a, from_disk=False)
            assert (await worker.residency.ensure(a, Tier.HOST, 5)).load_s == 0

            await worker.on_disk(c)
            worker.engine.in_use.add(c)
            with pytest.raises(HostMemoryFull, match=r"all 2 adapters .* are in use, leased or pinned"):
                await worker.residency.ensure(b, Tier.HOST, 0.3)
            waiting = asyncio.create_task(worker.residency.ensure(b, Tier.HOST, 5))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            worker.engine.in_use.clear()
            await waiting
            assert b in worker.hub.resident

    asyncio.run(scenario())


def test_a_lease_keeps_it(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a, b = stored.ids[:2]
        async with running_worker(stored, tmp_path, host=1, lease_s=0.6) as worker:
            began = time.monotonic()
            await worker.residency.ensure(a, Tier.HOST, 5)
            await asyncio.sleep(0.3)
            await worker.residency.ensure(a, Tier.HOST, 5)  # renewed
            with pytest.raises(AdapterInUse, match="leased to a request"):
                await worker.residency.evict(a, from_disk=False)
            with pytest.raises(HostMemoryFull):
                await worker.residency.ensure(b, Tier.HOST, 0.2)
            await worker.residency.ensure(b, Tier.HOST, 5)
            assert time.monotonic() - began >= 0.9

    asyncio.run(scenario())


def test_one_that_is_being_evicted_is_loaded_again(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a = stored.ids[0]
        async with running_worker(stored, tmp_path) as worker:
            await worker.residency.ensure(a, Tier.HOST, 5)
            await worker.on_disk(a)
            worker.engine.may_answer.clear()
            evicting = asyncio.create_task(worker.residency.evict(a, from_disk=False))
            await eventually(lambda: ("unload", a) in worker.engine.calls)
            wanted = asyncio.create_task(worker.residency.ensure(a, Tier.HOST, 5))
            await asyncio.sleep(0.05)
            assert not wanted.done()
            worker.engine.may_answer.set()
            assert await evicting
            await wanted
            assert worker.engine.calls == [("load", a), ("unload", a), ("load", a)]
            assert a in worker.engine.held
            worker.engine.held[a].check_digest()

    asyncio.run(scenario())


def test_an_eviction_that_is_cancelled_is_finished(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a = stored.ids[0]
        async with running_worker(stored, tmp_path) as worker:
            await worker.residency.ensure(a, Tier.HOST, 5)
            await worker.on_disk(a)
            worker.engine.may_answer.clear()
            evicting = asyncio.create_task(worker.residency.evict(a, from_disk=False))
            await eventually(lambda: ("unload", a) in worker.engine.calls)
            evicting.cancel()
            worker.engine.may_answer.set()
            await asyncio.wait([evicting])
            assert worker.hub.resident == set(worker.engine.held) == set()
            assert worker.folders() == []

    asyncio.run(scenario())


def test_evict(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a, b = stored.ids[:2]
        async with running_worker(stored, tmp_path) as worker:
            await worker.residency.ensure(a, Tier.HOST, 5)
            await worker.on_disk(a)
            assert await worker.residency.evict(a, from_disk=False)
            assert worker.hub.resident == set()
            assert worker.hub.on_disk == {a}
            assert await worker.residency.evict(a, from_disk=True)
            assert worker.hub.on_disk == set()
            assert list(worker.disk.iterdir()) == []
            assert not await worker.residency.evict(a, from_disk=True)
            worker.engine.may_answer.clear()
            loading = asyncio.create_task(worker.residency.ensure(b, Tier.HOST, 5))
            await eventually(lambda: ("load", b) in worker.engine.calls)
            with pytest.raises(AdapterInUse, match="being loaded"):
                await worker.residency.evict(b, from_disk=False)
            worker.engine.may_answer.set()
            await loading

    asyncio.run(scenario())


def test_pinned_ones_stay(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a, b, c, d = stored.ids[:4]
        async with running_worker(stored, tmp_path, host=3) as worker:
            await worker.residency.pin(a, 5)
            await worker.residency.pin(a, 5)  # again is nothing new
            for each in (b, c, d, b, c, d):
                await worker.residency.ensure(each, Tier.HOST, 5)
                assert a in worker.hub.resident
            with pytest.raises(AdapterInUse, match="pinned"):
                await worker.residency.evict(a, from_disk=True)
            await worker.residency.pin(b, 5)
            await worker.residency.pin(c, 5)
            with pytest.raises(PinsExceedBudget, match="unpin others or raise it"):
                await worker.residency.pin(d, 5)
            with pytest.raises(HostMemoryFull):
                await worker.residency.ensure(d, Tier.HOST, 0.3)
            worker.residency.unpin(a)
            worker.residency.unpin(a)
            await worker.on_disk(a, b, c)
            await worker.residency.ensure(d, Tier.HOST, 5)
            assert worker.hub.resident == {b, c, d}
            with pytest.raises(RevisionNotStored):
                await worker.residency.pin("sha256:" + "0" * 64, 5)
            assert set(worker.residency._host.pins) == {b, c}
            stored.object_of(stored.ids[5]).write_bytes(b"broken" * 100)
            worker.residency.unpin(b)
            with pytest.raises(AdapterError):
                await worker.residency.pin(stored.ids[5], 5)
            assert set(worker.residency._host.pins) == {c}

    asyncio.run(scenario())


@pytest.mark.parametrize("deadline_s", [0.1, 0.3])
def test_a_pin_that_ends_well_is_kept_whatever_became_of_others(
    stored: StoredAdapters, tmp_path: Path, deadline_s: float
):
    """Of two calls for a new revision one has the earlier deadline, and takes back what it has done."""

    async def scenario() -> None:
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
            await worker.residency.ensure(b, Tier.HOST, 5)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_unpinned", [True, False])
def test_a_pin_holds_while_an_overlapping_one_fails(stored: StoredAdapters, tmp_path: Path, is_unpinned: bool):
    """And while the operator's pin from before is released."""

    async def scenario() -> None:
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
            assert worker.residency._pins == {a: {PinOwner.OPERATOR}}
            worker.residency.unpin(a)
            assert worker.residency._pins == {}

    asyncio.run(scenario())


def test_what_the_engine_lost_by_itself_is_loaded_again_when_a_router_says_so(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a = stored.ids[0]
        async with running_worker(stored, tmp_path) as worker:
            await worker.residency.ensure(a, Tier.HOST, 5)
            worker.engine.held.clear()
            assert (await worker.residency.ensure(a, Tier.HOST, 5)).load_s == 0
            assert set(worker.engine.held) == set()  # nobody here can know
            assert (await worker.residency.ensure(a, Tier.HOST, 5, not_in_engine=True)).load_s > 0
            assert set(worker.engine.held) == worker.hub.resident == {a}
            assert worker.reads == [a]
            await worker.residency.ensure(a, Tier.HOST, 5, not_in_engine=True)  # it has it: no harm
            assert set(worker.engine.held) == worker.hub.resident == {a}
            await worker.residency.ensure(stored.ids[1], Tier.HOST, 5, not_in_engine=True)

    asyncio.run(scenario())


def test_a_folder_that_somebody_has_removed(stored: StoredAdapters, tmp_path: Path):
    """It is evicted all the same, and loaded again; the engine's mapping of it outlives it."""

    async def scenario() -> None:
        a, b = stored.ids[:2]
        async with running_worker(stored, tmp_path, host=1) as worker:
            await worker.residency.ensure(a, Tier.HOST, 5)
            await worker.on_disk(a)
            shutil.rmtree(worker.folders()[0])
            worker.engine.in_use.add(a)
            with pytest.raises(AdapterInUse, match="in use by requests"):
                await worker.residency.evict(a, from_disk=False)
            assert worker.hub.resident == {a}
            worker.engine.in_use.clear()
            await worker.residency.ensure(b, Tier.HOST, 5)
            assert worker.hub.resident == set(worker.engine.held) == {b}
            await worker.on_disk(b)
            await worker.residency.ensure(a, Tier.HOST, 5)

            await worker.engine_ends()
            shutil.rmtree(worker.folders()[0])
            await worker.engine.start()
            with pytest.raises(EngineError):  # which is no word against the adapter
                await worker.residency.ensure(a, Tier.HOST, 5)
            await worker.residency.ensure(a, Tier.HOST, 5)

    asyncio.run(scenario())


def test_an_eviction_that_fails_in_an_unknown_way_is_over(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a = stored.ids[0]
        async with running_worker(stored, tmp_path) as worker:
            await worker.residency.ensure(a, Tier.HOST, 5)
            await worker.on_disk(a)

            async def unload(_revision_id: str) -> None:
                raise KeyError("success")

            works, worker.residency._host._unload = worker.residency._host._unload, unload
            with pytest.raises(KeyError):
                await worker.residency.evict(a, from_disk=False)
            worker.residency._host._unload = works
            assert worker.hub.resident == set()  # nobody knows
            await worker.residency.ensure(a, Tier.HOST, 5)
            assert worker.hub.resident == {a}
            worker.engine.held[a].check_digest()
            assert await worker.residency.evict(a, from_disk=False)

    asyncio.run(scenario())


def test_a_new_engine_gets_what_was_in_memory_without_another_fetch(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        pinned, used = stored.ids[:2]
        async with running_worker(stored, tmp_path) as worker:
            await worker.residency.pin(pinned, 5)
            await worker.residency.ensure(used, Tier.HOST, 5)
            await worker.engine_ends()
            with pytest.raises(EngineUnreachable):
                await worker.residency.ensure(used, Tier.HOST, 5)
            assert worker.hub.resident == set()
            await worker.engine.start()
            worker.residency.engine_up()
            await eventually(lambda: worker.hub.resident == {pinned})
            await worker.residency.ensure(used, Tier.HOST, 5)
            assert set(worker.engine.held) == {pinned, used}
            assert sorted(worker.reads) == sorted([pinned, used])
            assert worker.value("prelude_worker_adapter_loads_total", source="host", result="ok") == 2

    asyncio.run(scenario())


def test_pins_are_tried_again_until_the_engine_takes_them(stored: StoredAdapters, tmp_path: Path, monkeypatch):
    from prefill_worker.residency import residency

    monkeypatch.setattr(residency, "_PIN_RETRY_S", 0.05)

    async def scenario() -> None:
        pinned = stored.ids[0]
        async with running_worker(stored, tmp_path) as worker:
            await worker.residency.pin(pinned, 5)
            await worker.engine_ends()
            worker.residency.engine_up()  # it says so, but it is not there yet
            await asyncio.sleep(0.2)
            await worker.engine.start()
            await eventually(lambda: worker.hub.resident == {pinned})

    asyncio.run(scenario())


def test_an_engine_that_ends_while_it_loads(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a = stored.ids[0]
        async with running_worker(stored, tmp_path) as worker:
            worker.engine.may_answer.clear()
            waiting = asyncio.create_task(worker.residency.ensure(a, Tier.HOST, 5))
            await eventually(lambda: worker.engine.calls)
            worker.residency.engine_gone()
            worker.engine.may_answer.set()  # its last word, too late
            with pytest.raises(EngineUnreachable, match="ended while"):
                await waiting
            assert worker.hub.resident == set()
            worker.engine.held.clear()
            await worker.residency.ensure(a, Tier.HOST, 5)
            assert worker.reads == [a]

    asyncio.run(scenario())


def test_what_the_engine_refuses_is_told_and_leaves_memory(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a, b = stored.ids[:2]
        async with running_worker(stored, tmp_path) as worker:
            worker.engine.refused[a] = "the rank is too large"
            with pytest.raises(AdapterRefusedByEngine, match=f"does not take {a}: the rank is too large") as caught:
                await worker.residency.ensure(a, Tier.HOST, 5)
            assert (caught.value.code, caught.value.http_status) == ("adapter_refused_by_engine", 422)
            [folder] = worker.engine.refused_folders
            assert str(folder) not in str(caught.value)
            assert worker.folders() == []
            await worker.residency.ensure(b, Tier.HOST, 5)

    asyncio.run(scenario())


def test_larger_than_all_of_host_memory(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        async with running_worker(stored, tmp_path, host_bytes=stored.room - 1) as worker:
            with pytest.raises(AdapterTooLarge, match=r"residency.host_bytes of \d+; raise it"):
                await worker.residency.ensure(stored.ids[0], Tier.HOST, 5)

    asyncio.run(scenario())


def the_clock_of_the_wall_jumps(monkeypatch: pytest.MonkeyPatch, first: int = 0) -> None:
    """Whenever somebody looks at it, forwards and backwards by decades; `first` is the jump that it begins with."""
    around = [0, 1e9, -1e9, 5, -1e9, 0]
    jumps = itertools.cycle(around[first:] + around[:first])
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(1.7e18 + 1e9 * next(jumps)))


@pytest.mark.parametrize("first", [1, 2], ids=["forwards", "backwards"])
def test_leases_and_the_order_of_uses_go_by_no_clock_of_the_wall(
    stored: StoredAdapters, tmp_path: Path, monkeypatch, first: int
):
    the_clock_of_the_wall_jumps(monkeypatch, first)
    lease_s = 1.0

    def series(worker: Worker) -> float:
        [family] = [each for each in worker.registry.collect() if each.name == "vllm:lora_requests_info"]
        [sample] = family.samples
        return sample.value

    async def scenario() -> None:
        a, b, c, d = stored.ids[:4]
        async with running_worker(stored, tmp_path, host=2, lease_s=lease_s) as worker:
            ensure = worker.residency.ensure
            await ensure(b, Tier.HOST, 5)
            await ensure(a, Tier.HOST, 5)
            shown = series(worker)
            used_at = time.monotonic()
            await ensure(b, Tier.HOST, 5)  # now a is the least recently used one
            with pytest.raises(HostMemoryFull):
                await ensure(c, Tier.HOST, 0.3)
            assert worker.hub.resident == {a, b}
            await ensure(c, Tier.HOST, 5)  # when the first lease is over
            assert 0.5 * lease_s < time.monotonic() - used_at < 3
            assert worker.hub.resident == {b, c}
            await asyncio.sleep(lease_s)
            await ensure(b, Tier.HOST, 5)
            await asyncio.sleep(lease_s)  # no lease is left, only the order of uses
            await ensure(d, Tier.HOST, 5)
            assert worker.hub.resident == set(worker.engine.held) == {b, d}
            assert series(worker) >= shown  # its value is a time of the wall, which never goes back there

    asyncio.run(scenario())


@pytest.mark.parametrize("first", range(6))
def test_the_order_of_uses_on_disk_goes_by_no_clock_of_the_wall(
    stored: StoredAdapters, tmp_path: Path, monkeypatch, first: int
):
    """Not over restarts either, which find it in the files' times."""
    the_clock_of_the_wall_jumps(monkeypatch, first)

    async def scenario() -> None:
        a, b, c, d, e, f = stored.ids[:6]
        async with engine_stand_in() as engine:

            @asynccontextmanager
            async def worker_with(disk: int) -> AsyncIterator[Worker]:
                engine.held.clear()
                async with running_worker(stored, tmp_path, disk=disk, engine=engine) as worker:
                    yield worker

            async def use(worker: Worker, *revision_ids: str) -> None:
                for each in revision_ids:
                    await worker.residency.ensure(each, Tier.HOST, 5)
                    await worker.on_disk(each)

            async with worker_with(disk=5) as worker:
                await use(worker, a, b, c, d, e)
                await use(worker, c, a)
            async with worker_with(disk=4) as worker:
                assert worker.hub.on_disk == {d, e, c, a}  # b was used least recently
                await use(worker, d)
                assert worker.reads == []
            async with worker_with(disk=3) as worker:
                assert worker.hub.on_disk == {c, a, d}
                await use(worker, c, f)  # in the place of a
                assert worker.hub.on_disk == {d, c, f}
                await use(worker, d)
            async with worker_with(disk=2) as worker:
                assert worker.hub.on_disk == {f, d}
            async with worker_with(disk=1) as worker:
                assert worker.hub.on_disk == {d}

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_operations_keep_the_budgets(stored: StoredAdapters, tmp_path: Path, seed: int):
    """Whatever is asked for in whatever order, what lies in shared memory and on disk is within the budgets."""
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
        await asyncio.sleep(chance.uniform(0, 2))
        try:
            match chance.randrange(10):
                case 0:
                    await worker.residency.pin(revision_id, 1)
                    await asyncio.sleep(0.1)
                    worker.residency.unpin(revision_id)
                case 1:
                    await worker.residency.evict(revision_id, from_disk=chance.random() < 0.5)
                case 2:
                    await worker.residency.ensure(revision_id, Tier.DISK, 1)
                case 3:
                    worker.engine.in_use ^= set(worker.engine.held) & {revision_id}
                case 4:
                    await asyncio.wait_for(worker.residency.ensure(revision_id, Tier.HOST, 5), chance.uniform(0, 0.05))
                case 5 if chance.random() < 0.15:
                    await worker.new_engine()
                case _:
                    await worker.residency.ensure(revision_id, Tier.HOST, 3, is_prewarm=chance.random() < 0.2)
        except (AdapterError, EngineError, TimeoutError):
            pass

    async def scenario() -> None:
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
                await worker.residency.ensure(each, Tier.HOST, 10)
            assert worker.hub.resident == set(worker.engine.held), seed
            for held in worker.engine.held.values():
                held.check_digest()
            await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(scenario())


def test_a_restarted_agent_has_its_disk_cache(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a, b, c = stored.ids[:3]
        async with engine_stand_in() as engine:
            async with running_worker(stored, tmp_path, engine=engine) as worker:
                for each in (a, b, c):
                    await worker.residency.ensure(each, Tier.HOST, 5)
                    await worker.on_disk(each)
                await worker.residency.ensure(a, Tier.HOST, 5)  # the latest used one now
            engine.held.clear()
            left_over = tmp_path / "disk" / (".sha256-" + "0" * 64 + "." + "1" * 32)
            left_over.write_bytes(b"half")
            async with running_worker(stored, tmp_path, disk=2, engine=engine) as worker:
                assert worker.hub.on_disk == {a, c}  # b was used least recently
                assert not left_over.exists()
                await worker.residency.ensure(a, Tier.HOST, 5)
                assert worker.reads == []

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "gone", "another one's"])
def test_a_damaged_file_on_disk_is_fetched_again(stored: StoredAdapters, tmp_path: Path, damage: str):
    async def scenario() -> None:
        a, b = stored.ids[:2]
        async with running_worker(stored, tmp_path) as worker:
            for each in (a, b):
                await worker.residency.ensure(each, Tier.DISK, 5)
            path, other = (worker.disk / each.replace(":", "-") for each in (a, b))
            data = path.read_bytes()
            match damage:
                case "flipped":
                    path.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
                case "cut":
                    path.write_bytes(data[:-10])
                case "empty":
                    path.write_bytes(b"")
                case "gone":
                    path.unlink()
                case _:
                    path.write_bytes(other.read_bytes())
            await worker.residency.ensure(a, Tier.HOST, 5)
            worker.engine.held[a].check_digest()
            assert worker.reads == [a, b, a]
            await worker.on_disk(a)
            await eventually(lambda: path.exists() and path.read_bytes() == data)
            assert worker.value("prelude_worker_adapter_loads_total", source="disk", result="damaged") == 1

    asyncio.run(scenario())


def test_the_disk_tier_alone(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a, b, c = stored.ids[:3]
        async with running_worker(stored, tmp_path, disk=2) as worker:
            assert (await worker.residency.ensure(a, Tier.DISK, 5)).lease_s == 0
            assert worker.hub.on_disk == {a}
            assert worker.engine.calls == []
            await asyncio.gather(*(worker.residency.ensure(b, tier, 5) for tier in (Tier.DISK, Tier.HOST)))
            assert worker.reads == [a, b]
            assert worker.hub.resident == {b}
            await worker.residency.ensure(c, Tier.DISK, 5)
            assert worker.hub.on_disk == {b, c}
            assert worker.disk_bytes() == 2 * stored.object_bytes

    asyncio.run(scenario())


def test_the_disk_is_written_when_no_load_is_under_way_or_after_a_while(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a, b = stored.ids[:2]
        async with running_worker(stored, tmp_path) as worker:
            worker.engine.may_answer.clear()
            loads = [asyncio.create_task(worker.residency.ensure(a, Tier.HOST, 5))]
            await eventually(lambda: worker.engine.calls)
            loads.append(asyncio.create_task(worker.residency.ensure(b, Tier.HOST, 5)))
            await eventually(lambda: len(worker.engine.calls) == 2)
            worker.residency._is_resident(a)
            await asyncio.sleep(0.2)
            assert worker.hub.on_disk == set()
            await worker.on_disk(a)  # b is still being loaded
            assert not loads[1].done()
            worker.engine.may_answer.set()
            await asyncio.gather(*loads)
            await worker.on_disk(b)

    asyncio.run(scenario())


def test_without_a_disk_tier(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a = stored.ids[0]
        async with running_worker(stored, tmp_path, disk=0) as worker:
            await worker.residency.ensure(a, Tier.HOST, 5)
            with pytest.raises(AdapterTooLarge, match=r"residency.disk_bytes of 0"):
                await worker.residency.ensure(stored.ids[1], Tier.DISK, 5)
            assert list(worker.disk.iterdir()) == []

    asyncio.run(scenario())


def test_a_real_full_disk(stored: StoredAdapters, tmp_path: Path, small_disk: Path):
    """It is smaller than its budget: old ones go; where none is left to go, adapters load without it."""

    async def scenario() -> None:
        a, b, c = stored.ids[:3]
        async with running_worker(stored, small_disk, disk=100) as worker:
            for each in (a, b, c):
                await worker.residency.ensure(each, Tier.HOST, 5)
            await eventually(lambda: not worker.residency._to_disk and c in worker.hub.on_disk)
            assert len(worker.hub.on_disk) < 3
            assert worker.hub.resident == {a, b, c}
            filler = small_disk / "filler"
            for each in list(worker.hub.on_disk):
                assert await worker.residency.evict(each, from_disk=True)
            with pytest.raises(OSError, match="No space"):
                filler.write_bytes(bytes(4 * stored.object_bytes))
            failures = worker.value("prelude_worker_adapter_disk_cache_failures_total")
            await worker.residency.ensure(stored.ids[3], Tier.HOST, 5)
            await eventually(lambda: worker.value("prelude_worker_adapter_disk_cache_failures_total") == failures + 1)
            with pytest.raises(AdapterError, match="the disk has no room"):
                await worker.residency.ensure(stored.ids[4], Tier.DISK, 1)
            filler.unlink()
            await worker.residency.ensure(stored.ids[4], Tier.DISK, 5)

    asyncio.run(scenario())


def test_shared_memory_with_less_room_than_the_budget(stored: StoredAdapters, tmp_path: Path):
    """The real thing is smaller than was configured: a clear error, and recovery by itself. Here a limit plays it."""

    async def scenario() -> None:
        a, b = stored.ids[:2]
        async with running_worker(stored, tmp_path, disk=0) as worker:
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
            try:
                with pytest.raises(HostMemoryFull, match=r"has no room .* lower it, or give this worker more"):
                    await worker.residency.ensure(a, Tier.HOST, 0.5)
                assert worker.folders() == []
                waiting = asyncio.create_task(worker.residency.ensure(b, Tier.HOST, 10))
                await asyncio.sleep(0.2)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            await waiting

    asyncio.run(scenario())


def test_a_sound_file_on_disk_outlives_trouble_in_host_memory(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a = stored.ids[0]
        async with running_worker(stored, tmp_path) as worker:
            await worker.residency.ensure(a, Tier.DISK, 5)
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
            try:
                with pytest.raises(HostMemoryFull):
                    await worker.residency.ensure(a, Tier.HOST, 2)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            for number in range(2, 20):  # in the way of the next folder
                (worker.shared / f"{a.replace(':', '-')}.{number}").mkdir(exist_ok=True)
            with pytest.raises(FileExistsError):
                await worker.residency.ensure(a, Tier.HOST, 5)
            for folder in worker.folders():
                folder.rmdir()
            assert worker.hub.on_disk == {a}
            await worker.residency.ensure(a, Tier.HOST, 5)
            assert worker.reads == [a]
            assert worker.value("prelude_worker_adapter_loads_total", source="disk", result="damaged") == 0

    asyncio.run(scenario())


def test_a_disk_that_does_not_delete(stored: StoredAdapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its files stay usable and keep their place in the budget; adapters load, and the agent lives."""
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.parent == tmp_path / "disk" and not path.name.startswith("."):
            raise OSError(errno.EROFS, "Read-only file system")
        unlink(path, missing_ok)

    async def scenario() -> None:
        a, b, c = stored.ids[:3]
        async with running_worker(stored, tmp_path, disk=1) as worker:
            await worker.residency.ensure(a, Tier.DISK, 5)
            with monkeypatch.context() as broken:
                broken.setattr(Path, "unlink", refuse)
                await worker.residency.ensure(b, Tier.HOST, 5)
                failures = "prelude_worker_adapter_disk_cache_failures_total"
                # Once every attempt to delete has failed: between two of them the file is not usable.
                await eventually(lambda: worker.value(failures) == disk_cache._MAX_FAILURES + 1)
                assert not worker.residency._to_disk
                assert worker.hub.resident == {b}
                assert worker.hub.on_disk == {a}
                assert worker.residency._disk.used_bytes == worker.disk_bytes() == stored.object_bytes
                with pytest.raises(DiskCacheFull, match="the disk has no room"):
                    await worker.residency.ensure(c, Tier.DISK, 0.3)
                with pytest.raises(DiskCacheFull, match="mend the disk"):
                    await worker.residency.evict(a, from_disk=True)
                await worker.residency.ensure(a, Tier.HOST, 5)
                assert worker.reads.count(a) == 1

                (worker.disk / a.replace(":", "-")).write_bytes(b"damaged")
                await worker.residency.evict(a, from_disk=False)
                await worker.residency.ensure(a, Tier.HOST, 5)  # from the store
                assert worker.hub.on_disk == set()
                assert worker.residency._disk.used_bytes == stored.object_bytes
                with pytest.raises(DiskCacheFull, match="mend the disk"):
                    await worker.residency.ensure(a, Tier.DISK, 0.3)
            await worker.residency.ensure(a, Tier.DISK, 5)
            await worker.residency.ensure(c, Tier.DISK, 5)
            assert worker.hub.on_disk == {c}
            assert worker.disk_bytes() == stored.object_bytes

    asyncio.run(scenario())


def test_shared_memory_that_is_really_smaller_than_the_budget(
    stored: StoredAdapters, tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
):
    """What was used least recently makes room, as if the budget was smaller."""

    async def scenario() -> None:
        async with running_worker(stored, tmp_path, shared_memory=small_disk) as worker:
            assert "shared memory is smaller than residency.host_bytes" in caplog.text
            for each in stored.ids[:6]:
                await worker.residency.ensure(each, Tier.HOST, 5)
                assert each in worker.engine.held
            assert 1 <= len(worker.hub.resident) <= 2

    asyncio.run(scenario())


def test_nothing_stays_mapped(stored: StoredAdapters, tmp_path: Path):
    wide = stored.add(write_random_lora(tmp_path / "wide", stored.base, 50, rank=32))

    async def scenario() -> None:
        async with running_worker(stored, tmp_path, limits=Limits(max_rank=16)) as worker:
            await worker.residency.ensure(stored.ids[0], Tier.HOST, 5)
            with pytest.raises(AdapterIncompatible):
                await worker.residency.ensure(wide, Tier.HOST, 5)
            gc.collect()  # the refusal's frames knew the file
            assert worker.num_mappings() == 1  # the stand-in's
            await worker.on_disk(stored.ids[0])
            await worker.residency.evict(stored.ids[0], from_disk=False)
            assert worker.num_mappings() == 0

    asyncio.run(scenario())


def test_a_disk_that_cannot_be_written(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a, b = stored.ids[:2]
        async with running_worker(stored, tmp_path) as worker:
            worker.disk.rename(tmp_path / "moved")
            await worker.residency.ensure(a, Tier.HOST, 5)
            await eventually(lambda: worker.value("prelude_worker_adapter_disk_cache_failures_total") == 1)
            with pytest.raises(DiskCacheFull, match="cannot be written"):
                await worker.residency.ensure(b, Tier.DISK, 0.5)
            (tmp_path / "moved").rename(worker.disk)
            await worker.residency.ensure(b, Tier.DISK, 5)

    asyncio.run(scenario())


def test_the_gauges(stored: StoredAdapters, tmp_path: Path):
    async def scenario() -> None:
        a, b, c = stored.ids[:3]
        async with running_worker(stored, tmp_path, host=7, disk=9) as worker:
            await worker.residency.ensure(a, Tier.HOST, 5)
            await worker.on_disk(a)
            await worker.residency.ensure(b, Tier.DISK, 5)
            prefix = "prelude_worker_adapter"
            assert worker.value(f"{prefix}_tier_bytes", tier="host") == stored.room
            assert worker.value(f"{prefix}_tier_budget_bytes", tier="host") == 7 * stored.room
            assert worker.value(f"{prefix}_tier_bytes", tier="disk") == 2 * stored.object_bytes
            assert worker.value(f"{prefix}_tier_adapters", tier="disk") == 2
            assert worker.value("prelude_worker_resident_adapters") == 1
            for stage in ("room", "fetch", "check", "engine", "disk_write"):
                assert worker.value(f"{prefix}_load_stage_seconds_count", stage=stage) >= 1, stage
            worker.engine.may_answer.clear()
            waiting = [asyncio.create_task(worker.residency.ensure(c, Tier.HOST, 5)) for _ in range(3)]
            await asyncio.sleep(0.05)
            assert worker.value(f"{prefix}_load_waiters") == 3
            assert worker.value(f"{prefix}_loads_running") == 1
            labels = {"max_lora": "4", "running_lora_adapters": a, "waiting_lora_adapters": c}
            changed_s = worker.registry.get_sample_value("vllm:lora_requests_info", labels)
            assert changed_s is not None
            assert abs(changed_s - time.time()) < 60
            worker.engine.may_answer.set()
            await asyncio.gather(*waiting)
            labels = {"max_lora": "4", "running_lora_adapters": ",".join(sorted([a, c])), "waiting_lora_adapters": ""}
            changed_again_s = worker.registry.get_sample_value("vllm:lora_requests_info", labels)
            assert changed_again_s is not None
            assert changed_again_s > changed_s
            assert worker.registry.get_sample_value("vllm:lora_requests_info", labels) == changed_again_s

    asyncio.run(scenario())


def test_wanted_by_the_engine_after_all_while_it_is_evicted(stored: StoredAdapters, tmp_path: Path):
    """A load for the disk that becomes one for the engine meets an eviction half way."""

    async def scenario() -> None:
        a = stored.ids[0]
        async with running_worker(stored, tmp_path) as worker:
            await worker.residency.ensure(a, Tier.HOST, 5)
            await worker.on_disk(a)
            assert await worker.residency.evict(a, from_disk=True)
            worker.residency._settings = worker.residency._settings.model_copy(update={"disk_bytes": 0})  # none behind
            await worker.residency.ensure(a, Tier.HOST, 5)
            entry = worker.residency._host.get(a)
            assert entry is not None
            writing = asyncio.Event()
            may_write = asyncio.Event()
            write = worker.residency._loader.write_to_disk

            async def slow_write(entry) -> None:
                await write(entry)
                writing.set()
                await may_write.wait()

            worker.residency._loader.write_to_disk = slow_write  # type: ignore[method-assign]
            to_disk = asyncio.create_task(worker.residency.ensure(a, Tier.DISK, 5))
            await writing.wait()
            worker.engine.may_answer.clear()
            evicting = asyncio.create_task(worker.residency._host.evict(a))
            await eventually(lambda: worker.engine.calls[-1] == ("unload", a))
            to_engine = asyncio.create_task(worker.residency.ensure(a, Tier.HOST, 5))
            await asyncio.sleep(0.01)
            may_write.set()
            await asyncio.sleep(0.05)
            worker.engine.may_answer.set()
            await asyncio.gather(to_disk, evicting, to_engine)
            assert worker.hub.resident == set(worker.engine.held) == {a}
            worker.engine.held[a].check_digest()

    asyncio.run(scenario())
