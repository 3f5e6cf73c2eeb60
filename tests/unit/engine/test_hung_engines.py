"""Really stopped processes: an engine that hangs is suspected, taken back if it returns, else started again."""

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from support.descriptors import no_descriptors
from support.engines import hangable_engine
from support.engines.running_engine import engine_spec
from support.waiting import until

from engine import hang_watch, supervisor
from engine.client import EngineClient
from engine.errors import EngineError
from engine.hang_watch import Timeouts
from engine.hooks.ledger import hooks_for
from engine.supervisor import EngineSnapshot, EngineStatus, EngineSupervisor
from engine.vital_signs import read_vitals
from process.free_ports import free_port
from process.lifetime import meanwhile

pytestmark = pytest.mark.slow

HANG_S = 1.0
WITHIN_S = 40.0  # on a machine that stalls


class Watched:
    """A supervised stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.snapshots: list[EngineSnapshot] = []
        self.supervisor: EngineSupervisor

    @property
    def now(self) -> EngineSnapshot:
        return self.snapshots[-1]

    async def until(self, is_so: Callable[[], bool]) -> None:
        await until(is_so, WITHIN_S)

    async def suspected(self) -> EngineSnapshot:
        """The first snapshot with a suspicion, which may have passed already."""
        await self.until(lambda: any(each.suspicion for each in self.snapshots))
        return next(each for each in self.snapshots if each.suspicion)

    def pid_of(self, part: str) -> int:
        if part == hang_watch.SERVER:
            children = {report.pid for report in self.now.reports} - {self.pid_of("scheduler-0")}
            return (children - {self.pid_of("detokenizer")}).pop()
        return read_vitals(self.folder, part).pid


@asynccontextmanager
async def watched_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check_files: Callable[[], None] = lambda: None
) -> AsyncIterator[Watched]:
    monkeypatch.setattr(supervisor, "OBSERVE_S", 0.1)
    monkeypatch.setattr(hang_watch, "_MAX_COUNTED_S", 0.15)
    port = free_port()
    spec = dataclasses.replace(engine_spec("prefill", tmp_path, tmp_path / "scratch"), host="127.0.0.1", port=port)
    hooks = [hook.name for hook in hooks_for("prefill", "cpu")]
    line = [sys.executable, hangable_engine.__file__, str(port), str(spec.report_dir), *hooks]
    monkeypatch.setattr(supervisor, "command", lambda _spec: line)
    root = str(Path(__file__).parents[3])
    monkeypatch.setattr(supervisor, "environment", lambda _spec, inherited: {**inherited, "PYTHONPATH": root})
    client = EngineClient(spec.url, timeout_s=1.0)
    engine = Watched(spec.report_dir)
    engine.supervisor = supervised = EngineSupervisor(
        spec,
        WITHIN_S,
        engine.snapshots.append,
        hang_timeouts=Timeouts(HANG_S, 300.0, compute_s=2 * HANG_S),
        num_answers=lambda: client.num_answers,
        check_files=check_files,
    )

    async def poll() -> None:
        while True:
            with contextlib.suppress(EngineError):
                await client.load()
            await asyncio.sleep(0.05)

    async with contextlib.aclosing(client), meanwhile(supervised.run(), poll()):
        await engine.until(lambda: bool(engine.snapshots) and engine.now.status is EngineStatus.UP)
        yield engine
    schedulers = {pid for each in engine.snapshots for pid in schedulers_of(each)}
    assert schedulers
    assert not [path for pid in schedulers for path in hangable_engine.shared_memory(pid) if path.exists()]


def schedulers_of(snapshot: EngineSnapshot) -> list[int]:
    return [report.pid for report in snapshot.reports if report.process == "scheduler-0"]


async def test_an_engine_that_must_not_start(tmp_path: Path, monkeypatch):
    started = engine_spec("prefill", tmp_path, tmp_path / "scratch").report_dir
    found: list[bool] = []
    schedulers: list[int] = []

    def check() -> None:
        found.append(any(started.rglob("*")))
        if len(found) == 4:
            schedulers.append(read_vitals(started, "scheduler-0").pid)
            assert all(path.exists() for path in hangable_engine.shared_memory(schedulers[0]))
        if len(found) in (1, 2, 4):
            raise EngineError(f"the weights are others, {len(found)}")

    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.05,))
    async with watched_engine(tmp_path, monkeypatch, check) as engine:
        reasons = [each.reason for each in engine.snapshots if each.status is EngineStatus.DOWN]
        assert reasons == [f"the weights are others, {number}" for number in (1, 2, 4)]
        assert found[:4] == [False, False, False, True]  # the third engine came up, with files that had changed
        assert len(found) == 6
        assert not any(path.exists() for path in hangable_engine.shared_memory(schedulers[0]))
        assert [each.status for each in engine.snapshots].count(EngineStatus.UP) == 1


# The KV thread is one of the scheduler's, so either can be found silent first.
@pytest.mark.parametrize("part", ["HTTP server", "scheduler-0|kv-0", "detokenizer"])
async def test_a_stopped_process(tmp_path: Path, monkeypatch, part: str):
    async with watched_engine(tmp_path, monkeypatch) as engine:
        first, victim = engine.now.incarnation, engine.pid_of(part.partition("|")[0])
        [scheduler] = schedulers_of(engine.now)
        assert all(path.exists() for path in hangable_engine.shared_memory(scheduler))
        os.kill(victim, signal.SIGSTOP)
        suspected = await engine.suspected()
        assert re.search(part, suspected.suspicion)
        assert (suspected.status, suspected.incarnation) == (EngineStatus.UP, first)  # streams go on, for now
        await engine.until(lambda: engine.now.incarnation not in ("", first))
        assert engine.now.num_restarts == 1
        assert not engine.now.suspicion
        assert not any(path.exists() for path in hangable_engine.shared_memory(scheduler))
        hung = next(each for each in engine.snapshots if each.status is EngineStatus.DOWN)
        assert re.search(rf"the engine's ({part}) has shown no progress", hung.reason)
        await engine.until(lambda: has_ended(victim))


def has_ended(pid: int) -> bool:
    """Also when nobody has asked for its exit status yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_detokenizer_without_hooks(tmp_path: Path, monkeypatch):
    """As on GPUs, where it is spawned: it never answers, which is no hang; that it is stopped shows all the same."""
    monkeypatch.setenv("DEAF_DETOKENIZER", "1")

    async with watched_engine(tmp_path, monkeypatch) as engine:
        first = engine.now.incarnation
        await asyncio.sleep(6 * HANG_S)
        assert engine.now.incarnation == first
        assert not any("detokenizer" in snapshot.suspicion for snapshot in engine.snapshots)
        [victim] = [r.pid for r in engine.now.reports if "sglang::detokenizer" in psutil.Process(r.pid).cmdline()]
        os.kill(victim, signal.SIGSTOP)
        assert "detokenizer" in (await engine.suspected()).suspicion
        await engine.until(lambda: engine.now.incarnation not in ("", first))


async def test_after_a_change_of_role_the_next_agent_s_answers_count(tmp_path: Path, monkeypatch):
    async with watched_engine(tmp_path, monkeypatch) as engine:
        await asyncio.sleep(0.5)  # it is watched
        engine.supervisor.hand_over(
            EngineSupervisor(engine.supervisor._spec, 1.0, engine.snapshots.append)
        )  # gets none
        assert "HTTP server" in (await engine.suspected()).suspicion


async def test_a_scheduler_that_computes_without_end(tmp_path: Path, monkeypatch):
    async with watched_engine(tmp_path, monkeypatch) as engine:
        (engine.folder / "spins").touch()
        suspected = await engine.suspected()
        assert re.fullmatch(
            r"the engine's scheduler-0 has shown no progress for \d+ s, though it computes", suspected.suspicion
        )
        await engine.until(lambda: engine.now.status is EngineStatus.DOWN)
        (engine.folder / "spins").unlink()
        await engine.until(lambda: engine.now.incarnation not in ("", suspected.incarnation))


async def test_a_kv_thread_that_has_ended(tmp_path: Path, monkeypatch):
    """One foreign message ends it, and its process lives on."""

    async with watched_engine(tmp_path, monkeypatch) as engine:
        first = engine.now.incarnation
        await engine.until(lambda: read_vitals(engine.folder, "kv-0").num_signs > 0)
        (engine.folder / "kv-ends").touch()
        assert "kv-0" in (await engine.suspected()).suspicion
        await engine.until(lambda: engine.now.incarnation not in ("", first))


async def test_an_agent_without_descriptors(tmp_path: Path, monkeypatch):
    """It can neither ask its engine nor look at its processes: the engine serves on."""

    async with watched_engine(tmp_path, monkeypatch) as engine:
        up = engine.now
        with no_descriptors():
            await asyncio.sleep(4 * HANG_S)  # twice the time after which a still part is one that hangs
        await asyncio.sleep(HANG_S)
        assert engine.now == up


async def test_a_process_that_returns_in_time(tmp_path: Path, monkeypatch):
    async with watched_engine(tmp_path, monkeypatch) as engine:
        first, victim = engine.now.incarnation, engine.pid_of("scheduler-0")
        os.kill(victim, signal.SIGSTOP)
        await engine.until(lambda: bool(engine.now.suspicion))
        os.kill(victim, signal.SIGCONT)
        await engine.until(lambda: not engine.now.suspicion)
        assert (engine.now.status, engine.now.incarnation) == (EngineStatus.UP, first)
