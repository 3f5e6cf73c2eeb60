"""Leases and LRU order do not depend on the wall clock."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

import pytest
from support.adapters.held_adapters import (
    StoredAdapters,
    Worker,
    running_worker,
)

from prefill_worker.residency import Tier
from prefill_worker.residency.errors import (
    HostMemoryFull,
)


def jumping_wall_clock(monkeypatch: pytest.MonkeyPatch, first: int = 0) -> None:
    """Let every reading jump by decades, forwards and backwards. `first` selects the first jump."""
    around = [0, 1e9, -1e9, 5, -1e9, 0]
    jumps = itertools.cycle(around[first:] + around[:first])
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(1.7e18 + 1e9 * next(jumps)))


@pytest.mark.parametrize("first", [1, 2], ids=["forwards", "backwards"])
@pytest.mark.slow
async def test_leases_and_lru_order_in_memory(stored: StoredAdapters, tmp_path: Path, monkeypatch, first: int):
    jumping_wall_clock(monkeypatch, first)
    lease_s = 2.0

    def series(worker: Worker) -> float:
        [family] = [each for each in worker.registry.collect() if each.name == "vllm:lora_requests_info"]
        [sample] = family.samples
        return sample.value

    a, b, c, d = stored.ids[:4]
    async with running_worker(stored, tmp_path, host=2, lease_s=lease_s) as worker:
        ensure = worker.residency.ensure
        await ensure(b, Tier.HOST, 30)
        await ensure(a, Tier.HOST, 30)
        shown = series(worker)
        used_at = time.monotonic()
        await ensure(b, Tier.HOST, 30)  # now a is the least recently used one
        with pytest.raises(HostMemoryFull):
            await ensure(c, Tier.HOST, 0.3)
        assert worker.hub.resident == {a, b}
        await ensure(c, Tier.HOST, 30)  # when the first lease is over
        assert 0.5 * lease_s < time.monotonic() - used_at < 20
        assert worker.hub.resident == {b, c}
        await asyncio.sleep(lease_s)
        await ensure(b, Tier.HOST, 30)
        await asyncio.sleep(lease_s)  # all leases have expired
        await ensure(d, Tier.HOST, 30)
        assert worker.hub.resident == set(worker.engine.held) == {b, d}
        assert series(worker) >= shown  # a wall-clock time, kept monotonic
