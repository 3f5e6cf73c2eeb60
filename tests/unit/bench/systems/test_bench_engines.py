"""Engines of benchmarks: their settings, and what is said of one that fails."""

import asyncio
from pathlib import Path

import pytest

from bench.errors import SystemFailed
from bench.systems import engines
from engine.supervisor import EngineSnapshot, EngineStatus

SPEC = engines.engine_spec("stock", Path("m"), None, Path("s"), request_tokens=12, concurrency=2)


class PretendedSupervisor:
    """An engine that starts and dies, or does not start."""

    comes_up = True

    def __init__(self, spec, start_timeout_s, on_change):
        self.on_change = on_change
        self.snapshot = EngineSnapshot(EngineStatus.STARTING, "", (), 0, "starting")

    def set(self, status, incarnation, reason):
        self.snapshot = EngineSnapshot(status, incarnation, (), 0, reason)
        self.on_change(self.snapshot)

    async def run(self):
        if self.comes_up:
            self.set(EngineStatus.UP, "one", "")
            await asyncio.sleep(0.01)
        self.set(EngineStatus.DOWN, "", "it ran out of luck")
        await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("comes_up", "complaint"), [(False, "did not start: it ran"), (True, "died during the benchmark: it ran")]
)
async def test_an_engine_that_fails_fails_the_benchmark(monkeypatch, comes_up, complaint):
    monkeypatch.setattr(engines, "EngineSupervisor", PretendedSupervisor)
    monkeypatch.setattr(PretendedSupervisor, "comes_up", comes_up)

    with pytest.raises(SystemFailed, match=complaint):
        async with engines.running_engine(SPEC):
            await asyncio.sleep(0.1)


async def test_a_request_that_fails_because_the_engine_died_says_so(monkeypatch):
    monkeypatch.setattr(engines, "EngineSupervisor", PretendedSupervisor)
    monkeypatch.setattr(engines, "_NOTICE_S", 0.1)

    with pytest.raises(SystemFailed, match="died during the benchmark: it ran out of luck") as caught:
        async with engines.running_engine(SPEC):
            raise SystemFailed("server disconnected")
    assert "disconnected" in str(caught.value.__context__ or caught.value.__cause__)
