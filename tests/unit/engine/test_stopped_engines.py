"""Real processes: whoever supervises an engine leaves none behind."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

import psutil
import pytest
from support.engines.running_engine import engine_spec

from engine import supervisor
from engine.supervisor import EngineSnapshot, EngineSupervisor
from process.free_ports import free_port

_IGNORES_SIGTERM = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


@pytest.mark.slow
async def test_an_engine_is_gone_when_its_supervisor_is_even_if_that_is_cancelled_twice(tmp_path: Path, monkeypatch):
    """As by a second Ctrl-C: the first one gives the engine seconds to end."""
    runs = tmp_path / "runs"
    monkeypatch.setattr(supervisor, "command", lambda _spec: [sys.executable, "-c", _IGNORES_SIGTERM, str(runs)])
    monkeypatch.setattr(supervisor, "_STOP_GRACE_S", 1.0)
    spec = dataclasses.replace(
        engine_spec("prefill", tmp_path, tmp_path / "scratch"), host="127.0.0.1", port=free_port()
    )

    running = asyncio.create_task(EngineSupervisor(spec, 60.0, lambda _snapshot: None).run())
    async with asyncio.timeout(40):
        while not runs.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    [engine] = [each for each in psutil.Process().children() if str(runs) in each.cmdline()]
    for _ in range(2):
        running.cancel()
        await asyncio.sleep(0.1)
    with pytest.raises(asyncio.CancelledError):
        await running
    found = [engine] if engine.is_running() else []
    assert found == []
    assert not spec.scratch.exists()


_ENDS_AT_START = """
import mmap, os, pathlib, sys, time
path = pathlib.Path(f"/dev/shm/sglang_loads_stand-in_{os.getpid()}.shm")
with path.open("w+b") as file:
    file.truncate(mmap.PAGESIZE)
    mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
with open(sys.argv[1], "a") as file:
    print(path, file=file)
time.sleep(1)
sys.exit(3)
"""


@pytest.mark.slow
async def test_an_engine_that_ends_at_start_leaves_no_shared_memory(tmp_path: Path, monkeypatch):
    """It is started again and again, so what it left would fill the memory."""
    paths = tmp_path / "paths"
    monkeypatch.setattr(supervisor, "command", lambda _spec: [sys.executable, "-c", _ENDS_AT_START, str(paths)])
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.05,))
    monkeypatch.setattr(supervisor, "_LOOK_S", 0.1)
    spec = dataclasses.replace(
        engine_spec("prefill", tmp_path, tmp_path / "scratch"), host="127.0.0.1", port=free_port()
    )

    is_third = asyncio.Event()

    def note(snapshot: EngineSnapshot) -> None:
        if snapshot.num_restarts == 2:
            is_third.set()

    running = asyncio.create_task(EngineSupervisor(spec, 60.0, note).run())
    async with asyncio.timeout(40):
        await is_third.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    made = [Path(line) for line in paths.read_text().splitlines()]
    assert len(made) >= 2
    assert not [path for path in made if path.exists()]
