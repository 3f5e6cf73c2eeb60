"""Adapters come to a worker: from the store and the disk into host memory and its engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from held_adapters import StoredAdapters, running_worker

from prefill_worker.residency import Tier


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

    asyncio.run(scenario())
