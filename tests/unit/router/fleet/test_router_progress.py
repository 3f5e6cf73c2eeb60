"""When a request's workers count as stalled, with a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from router.errors import WorkerStalled
from router.fleet.lost_workers import Observed, ProgressCheck

TIMEOUT_S = 8.0


@dataclass
class Scene:
    """One worker, one check of it, and the timers that the check has set."""

    now: float = 1000.0
    progressed_at: float = 1000.0
    has_contact: bool = True
    stalls: list[WorkerStalled] = field(default_factory=list)
    timers: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def call_later(self, seconds: float, call: Callable[[], None]) -> SimpleNamespace:
        self.timers.append((self.now + seconds, call))
        return SimpleNamespace(cancel=self.timers.clear)

    def observe(self) -> tuple[Observed, ...]:
        return (Observed("d0", SimpleNamespace(progressed_at=self.progressed_at), self.has_contact),)  # type: ignore[arg-type]

    def run_until(self, end: float, late_s: float = 0.0) -> None:
        """Every timer that is due by then, each that much too late."""
        while self.timers and self.timers[0][0] + late_s <= end:
            due, call = self.timers.pop(0)
            self.now = due + late_s
            call()
        self.now = end


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: scene)
    ProgressCheck(scene.observe, lambda: scene.now, TIMEOUT_S, scene.stalls.append)
    return scene


def test_a_worker_without_progress_has_stalled_once(scene: Scene):
    scene.run_until(1007.9)
    assert not scene.stalls
    scene.run_until(1100.0)
    assert [str(each) for each in scene.stalls] == ["d0 made no progress for 8 s"]
    assert not scene.timers


def test_the_time_counts_from_the_last_progress(scene: Scene):
    scene.progressed_at = 1007.0
    scene.run_until(1014.9)
    assert not scene.stalls
    scene.run_until(1018.0)
    assert scene.stalls


def test_without_contact_no_time_counts(scene: Scene):
    scene.has_contact = False
    scene.run_until(1100.0)
    scene.has_contact = True
    scene.run_until(1106.0)
    assert not scene.stalls
    scene.run_until(1111.0)
    assert scene.stalls


def test_a_check_after_a_standstill_of_this_process_does_not_count(scene: Scene):
    """The workers' reports of that time wait in sockets."""
    scene.run_until(1020.0, late_s=12.0)
    assert not scene.stalls
    scene.progressed_at = 1021.0  # has been read
    scene.run_until(1028.0)
    assert not scene.stalls
    scene.run_until(1032.0)
    assert scene.stalls
