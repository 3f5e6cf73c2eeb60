"""A clock that tests move, and an event loop whose clock jumps to the next timer when it would otherwise sleep."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

T = TypeVar("T")


class Clock:
    """A clock that the test moves."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def stand_still(self, seconds: float) -> None:
        """As if the process was not scheduled for so long: timers that are due meanwhile come late."""
        self._now += seconds

    def _run_once(self) -> None:
        timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        if not self._ready:  # type: ignore[attr-defined]
            if not timers:
                raise RuntimeError("deadlock: no task is ready and no timer is set")
            self._now = max(self._now, min(timers))
        super()._run_once()  # type: ignore[misc]


def run_in_virtual_time(scenario: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario)


VIRTUAL = SimpleNamespace(run=run_in_virtual_time)  # as `LOOP` of a module: for its tests that are coroutines
