"""Engines that do not start, and those that are stopped: their reason is found, and nothing of them is left behind."""

import asyncio
import json
import os
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from support.engines.running_engine import engine_spec
from support.waiting import until

from engine import supervisor
from engine.arguments import EngineSpec
from engine.hooks.ledger import hooks_for
from engine.hooks.report import ProcessReport
from engine.output import reason_in
from engine.supervisor import EngineGivenUp, EngineSnapshot, EngineStatus, EngineSupervisor, StartFailures
from process.log import Stopwatch

WARNED = [
    "/x/parser.py:12: SyntaxWarning: invalid escape sequence '\\d'",
    "  pattern = '\\d+'",
]
LEAKS = [
    "nanobind: leaked 64 types!",
    ' - leaked type "PROPAGATE_NAN"',
    " - ... skipped remainder",
    "nanobind: this is likely caused by a reference counting issue in the binding code.",
    "See https://nanobind.readthedocs.io/en/latest/refleaks.html",
]
TRACEBACK = [
    "[2026-11-28 08:00:00] Scheduler hit an exception: Traceback (most recent call last):",
    '  File "/x/scheduler.py", line 1, in run',
    "    import torchvision",
    "ModuleNotFoundError: No module named 'torchvision'",
]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (TRACEBACK + WARNED, "ModuleNotFoundError: No module named 'torchvision'"),
        (
            [
                *TRACEBACK,
                "torch.OutOfMemoryError: CUDA out of memory",
                "[a] Received sigquit from a child",
            ],
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        (
            ["Prelude's hooks could not be installed: jsonschema requires pycountry", *WARNED],
            "Prelude's hooks could not be installed: jsonschema requires pycountry",
        ),
        (
            ["  [--help]", "sglang serve: error: unrecognized arguments: --no-such", *LEAKS],
            "sglang serve: error: unrecognized arguments: --no-such",
        ),
        ([*WARNED, "loading", "killed", *LEAKS], "loading | killed"),
        (WARNED, ""),
        ([], ""),
    ],
)
def test_the_reason_is_the_last_error(lines: list[str], reason: str):
    assert reason_in(lines) == reason


def test_what_is_the_same_failure():
    failures = StartFailures()
    ended = "the engine ended with code 1 at start: KeyError: 'x' in process"
    assert [failures.is_enough(f"{ended} {pid} at 0x{pid:x}") for pid in (7, 81, 912)] == [False, False, True]
    failures = StartFailures()
    assert not any(failures.is_enough(reason) for reason in ("a", "a", "b", "a", "a", "b"))
    failures = StartFailures()
    failures.succeeded()  # a worker that has served may fail for what passes: a GPU or a port that others hold
    assert not any(failures.is_enough("a") for _ in range(9))


class Supervised:
    """The supervisor of a program in place of an engine."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, *words: str) -> None:
        monkeypatch.setattr(supervisor, "command", lambda _spec: [sys.executable, "-c", program, *words])
        monkeypatch.setattr(supervisor, "environment", lambda _spec, inherited: inherited)
        monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.05,))
        self.spec = engine_spec("unified", tmp_path, tmp_path / "scratch")
        self.seen: list[EngineSnapshot] = []
        self.found = asyncio.Event()

    def start(self, wanted: str = "", start_timeout_s: float = 60.0, **settings) -> asyncio.Task[None]:
        """Run it. `found` is set once a snapshot says what is wanted."""

        def note(snapshot: EngineSnapshot) -> None:
            self.seen.append(snapshot)
            if wanted in f"{snapshot.reason}, restarts: {snapshot.num_restarts}":
                self.found.set()

        return asyncio.create_task(EngineSupervisor(self.spec, start_timeout_s, note, **settings).run())


async def test_a_supervisor_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = "import warnings\nwarnings.warn('x', SyntaxWarning)\nimport no_such_module\n"
    supervised = Supervised(tmp_path, monkeypatch, program)
    with pytest.raises(EngineGivenUp, match="ModuleNotFoundError: No module named 'no_such_module'"):
        await asyncio.wait_for(supervised.start(), 120)
    assert [each.status for each in supervised.seen].count(EngineStatus.DOWN) == 3
    assert supervised.seen[-1].status is EngineStatus.STOPPED


async def test_the_value_that_an_argument_cannot_have_is_in_the_reason(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Before thousands of characters of those that it could have."""
    program = (
        "import argparse\nparser = argparse.ArgumentParser('sglang serve')\n"
        "parser.add_argument('--tool-call-parser', choices=['a' * 600])\n"
        "parser.parse_args(['--tool-call-parser', 'qwen26'])\n"
    )
    supervised = Supervised(tmp_path, monkeypatch, program)
    with pytest.raises(EngineGivenUp, match=r"code 2 at start: sglang serve: error: .* invalid choice: 'qwen26'"):
        await asyncio.wait_for(supervised.start(), 120)


async def test_an_engine_that_says_nothing_names_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    supervised = Supervised(tmp_path, monkeypatch, "import signal; signal.pause()")
    running = supervised.start("did not answer within 0.1 s, its start_timeout_s: it said nothing", 0.1)
    await asyncio.wait_for(supervised.found.wait(), 120)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_files_that_cannot_be_read_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    come = threading.Event()
    supervised = Supervised(tmp_path, monkeypatch, "")
    running = supervised.start("could not be read within 0.2 s", 0.2, check_files=lambda: come.wait(40))
    await asyncio.wait_for(supervised.found.wait(), 120)
    running.cancel()
    come.set()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("step", ["its first decode", "its files are checked again", "its first prefill"])
async def test_a_role_that_changes_while_the_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str):
    """Else the next agent would wait for good for an engine that has the role before."""
    supervised = Supervised(tmp_path, monkeypatch, "import time; time.sleep(600)")
    spec = replace(supervised.spec, role="switching")
    hooks, loop = [each.name for each in hooks_for(spec.role, spec.device)], asyncio.get_running_loop()
    steps = ["its files are checked", "its first decode", "its files are checked again", "its first prefill"]

    async def next_step(kind: str) -> None:
        if steps and kind in steps[0] and steps.pop(0) == step:
            await engine.change_role("decode", Stopwatch())

    class Client:
        async def answers(self) -> bool:
            return True

        async def spare_garbage_collection(self) -> None: ...

        async def change_role(self, role: str, _timeout_s: float) -> bool:
            await next_step(role)
            for process in ("server", "scheduler-0"):
                report = ProcessReport(process, os.getpid(), hooks, role=role)
                (spec.report_dir / f"{process}.json").write_text(json.dumps(asdict(report)))
            return True

        async def aclose(self) -> None: ...

    def check_files() -> None:
        asyncio.run_coroutine_threadsafe(next_step("files"), loop).result(30)

    def note(snapshot: EngineSnapshot) -> None:
        if snapshot.status is EngineStatus.UP:
            supervised.found.set()

    monkeypatch.setattr(EngineSpec, "client", lambda _spec, _timeout_s: Client())
    engine = EngineSupervisor(spec, 60, note, check_files=check_files)
    running = asyncio.create_task(engine.run())
    await asyncio.wait_for(supervised.found.wait(), 120)
    assert ({each.role for each in engine.snapshot.reports}, engine.snapshot.num_restarts) == ({"decode"}, 0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


_LEAVES_A_CHILD = """
import pathlib, subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open(sys.argv[1], "a") as file:
    print(child.pid, file=file)
sys.exit(3)
"""


async def test_a_child_that_holds_the_output_holds_up_no_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It has left the engine's group, as compilers' workers do, so it outlives it for a while, or for good."""
    monkeypatch.setattr(supervisor, "_OUTPUT_S", 0.1)
    children = tmp_path / "children"
    supervised = Supervised(tmp_path, monkeypatch, _LEAVES_A_CHILD, str(children))
    running = supervised.start("restarts: 2")
    try:
        await asyncio.wait_for(supervised.found.wait(), 120)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        left = [psutil.Process(int(pid)) for pid in children.read_text().split()]
        for child in left:
            child.kill()
        psutil.wait_procs(left)
        await asyncio.sleep(0.1)  # the loop closes its ends of their pipes


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
    supervised = Supervised(tmp_path, monkeypatch, _IGNORES_SIGTERM, str(runs))
    monkeypatch.setattr(supervisor, "_STOP_GRACE_S", 1.0)
    running = supervised.start()
    await until(runs.exists, 40)
    [engine] = [each for each in psutil.Process().children() if str(runs) in each.cmdline()]
    for _ in range(2):
        running.cancel()
        await asyncio.sleep(0.1)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not engine.is_running()
    assert not supervised.spec.scratch.exists()


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
    monkeypatch.setattr(supervisor, "_LOOK_S", 0.1)
    supervised = Supervised(tmp_path, monkeypatch, _ENDS_AT_START, str(paths))
    running = supervised.start("restarts: 2")
    await asyncio.wait_for(supervised.found.wait(), 120)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    made = [Path(line) for line in paths.read_text().splitlines()]
    assert len(made) >= 2
    assert not [path for path in made if path.exists()]
