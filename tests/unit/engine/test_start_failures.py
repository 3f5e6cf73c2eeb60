"""Engines that do not start: the reason is their last error, and the same one three times ends the attempts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from support.engines.running_engine import engine_spec

from engine import supervisor
from engine.output import reason_in
from engine.supervisor import EngineGivenUp, EngineSnapshot, EngineStatus, EngineSupervisor, StartFailures

WARNED = [
    "/x/parser.py:12: SyntaxWarning: invalid escape sequence '\\d'",
    "  pattern = '\\d+'",
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
        ([*WARNED, "loading", "killed"], "loading | killed"),
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


async def test_a_supervisor_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "engine.py"
    program.write_text("import warnings\nwarnings.warn('x', SyntaxWarning)\nimport no_such_module\n")
    spec = engine_spec("unified", tmp_path, tmp_path / "scratch")
    monkeypatch.setattr(supervisor, "command", lambda _spec: [sys.executable, str(program)])
    monkeypatch.setattr(supervisor, "environment", lambda _spec, inherited: inherited)
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.0,))
    seen: list[EngineSnapshot] = []

    with pytest.raises(EngineGivenUp, match="ModuleNotFoundError: No module named 'no_such_module'"):
        await asyncio.wait_for(EngineSupervisor(spec, 60.0, seen.append).run(), 120)
    assert [each.status for each in seen].count(EngineStatus.DOWN) == 3
    assert seen[-1].status is EngineStatus.STOPPED
