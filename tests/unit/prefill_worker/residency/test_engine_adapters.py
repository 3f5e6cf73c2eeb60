"""Loading and unloading adapters through the engine's client."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.adapters.held_adapters import StoredAdapters
from support.engines.engine_stand_in import engine_stand_in

from engine.client import EngineClient
from engine.errors import EngineRefused, EngineUnreachable


async def test_loads_and_unloads_are_idempotent(stored: StoredAdapters, tmp_path: Path):
    revision_id = stored.ids[0]
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    stored.store.fetch(revision_id, tmp_path / "adapter" / "packed.safetensors")

    async with engine_stand_in() as engine:
        client = EngineClient(engine.url)
        try:
            assert not await client.unload_adapter(revision_id, 5)
            await client.load_adapter(revision_id, tmp_path / "adapter", 5)
            await client.load_adapter(revision_id, tmp_path / "adapter", 5)
            assert await client.loaded_adapters() == {revision_id}
            engine.in_use.add(revision_id)
            with pytest.raises(EngineRefused, match="is in use"):
                await client.unload_adapter(revision_id, 5)
            engine.in_use.clear()
            assert await client.unload_adapter(revision_id, 5)
            assert not await client.unload_adapter(revision_id, 5)
            assert await client.loaded_adapters() == frozenset()
            engine.may_answer.clear()
            with pytest.raises(EngineUnreachable):
                await client.unload_adapter(revision_id, 0.1)
        finally:
            await client.aclose()


@pytest.mark.slow
async def test_idle_connections_are_closed_before_the_engine_closes_them():
    """The engine does so after 5 s. A load sent at that moment would look like the engine's death."""

    async with engine_stand_in() as engine:
        client = EngineClient(engine.url)
        try:
            for _ in range(2):
                await client.loaded_adapters()
            assert len(engine.connections) == 1
            await asyncio.sleep(3)
            await client.loaded_adapters()
            assert len(engine.connections) == 2
        finally:
            await client.aclose()
