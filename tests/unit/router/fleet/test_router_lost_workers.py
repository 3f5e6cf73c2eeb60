"""When workers of a request count as stalled, and the breaker of one worker, by clocks that the tests move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from support.routers.virtual_time import VIRTUAL

from router.errors import WorkerStalled
from router.fleet.lost_workers import Breaker, Observed, ProgressCheck

LOOP = VIRTUAL
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


# ---- the breaker ----------------------------------------------------------------------------------------------------


def breaker_and_changes() -> tuple[Breaker, list[bool]]:
    """And whether it was blocking, after each change."""
    seen: list[bool] = []
    breaker = Breaker("w", lambda: seen.append(breaker.is_blocking))
    return breaker, seen


def fail(breaker: Breaker, times: int = 3) -> None:
    for _ in range(times):
        breaker.failed()


async def test_failures_in_a_row_open_it_for_a_rest():
    breaker, seen = breaker_and_changes()
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert not breaker.is_blocking
    breaker.failed()
    assert breaker.is_blocking
    fail(breaker, 9)  # calls that had begun before
    await asyncio.sleep(0.99)
    assert breaker.is_blocking
    await asyncio.sleep(0.02)
    assert seen == [True, False]


async def test_one_probe_decides():
    breaker, _ = breaker_and_changes()
    fail(breaker)
    await asyncio.sleep(1.01)
    breaker.placed()
    assert breaker.is_blocking  # for all others
    breaker.succeeded()
    assert not breaker.is_blocking
    fail(breaker, 2)
    assert not breaker.is_blocking  # it counts from zero


async def test_each_failed_probe_doubles_the_rest():
    breaker, _ = breaker_and_changes()
    fail(breaker)
    rests = []
    for _ in range(5):
        began_at = asyncio.get_running_loop().time()
        while breaker.is_blocking:  # noqa: ASYNC110 under a virtual clock
            await asyncio.sleep(0.01)
        rests.append(round(asyncio.get_running_loop().time() - began_at))
        breaker.placed()
        breaker.failed()
    assert rests == [1, 2, 4, 8, 8]


async def test_a_probe_whose_client_leaves_is_followed_by_another_one():
    breaker, _ = breaker_and_changes()
    fail(breaker)
    await asyncio.sleep(1.01)
    breaker.placed()
    await asyncio.sleep(2.01)
    assert not breaker.is_blocking
    breaker.placed()
    assert breaker.is_blocking


async def test_another_engine_starts_closed():
    breaker, seen = breaker_and_changes()
    fail(breaker)
    breaker.reset()
    assert not breaker.is_blocking
    await asyncio.sleep(5)
    assert seen == [True, False]


async def test_transfers_that_fail_at_once_count_once():
    breaker, _ = breaker_and_changes()
    for _ in range(2):
        for _ in range(32):  # all that were under way to a peer that ends
            breaker.transfer_failed()
        await asyncio.sleep(0.6)
    assert not breaker.is_blocking
    breaker.transfer_failed()
    assert breaker.is_blocking
