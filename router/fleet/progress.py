"""Detects stalls: none of the workers that a request waits for reports progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from router.errors import WorkerStalled
from router.fleet.worker_loads import WorkerLoad

_CHECKS = 4  # per timeout


@dataclass(frozen=True, slots=True)
class Observed:
    """The current state of one worker that a request waits for. It may have left since the request began."""

    name: str
    load: WorkerLoad
    has_contact: bool


class ProgressCheck:
    """Calls `on_stall`, once, when none of the workers has made progress for `timeout_s`. Active until `end`.

    Time without contact to one of the workers does not count, because its progress is unknown then. A check that runs
    late does not count either: this process was stalled, and must first read what workers have reported meanwhile.
    `observe` returns the workers and is called at each check; nearly all requests end before the first one.
    """

    def __init__(
        self,
        observe: Callable[[], tuple[Observed, ...]],
        clock: Callable[[], float],
        timeout_s: float,
        on_stall: Callable[[WorkerStalled], None],
    ) -> None:
        self._observe = observe
        self._clock = clock
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._began_at = clock()
        self._loop = asyncio.get_running_loop()
        self._check_after(timeout_s)

    def end(self) -> None:
        """Idempotent."""
        self._timer.cancel()

    def _check_after(self, seconds: float) -> None:
        self._late_at = self._clock() + seconds + self._timeout_s / _CHECKS
        self._timer = self._loop.call_later(seconds, self._check)

    def _check(self) -> None:
        workers = self._observe()
        if not all(worker.has_contact for worker in workers):
            self._began_at = self._clock()
        latest = max(self._began_at, *(worker.load.progressed_at for worker in workers))
        now = self._clock()
        if now - latest < self._timeout_s or now > self._late_at:
            self._check_after(self._timeout_s / _CHECKS)
            return
        names = tuple(worker.name for worker in workers)
        text = f"{' and '.join(names)} made no progress for {self._timeout_s:g} s"
        self._on_stall(WorkerStalled(text, workers=names))
