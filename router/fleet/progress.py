"""Notices that nothing moves: the workers that a request waits for report no progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.errors import WorkerStalled
from router.fleet.worker_loads import WorkerLoads

_CHECKS = 4  # per timeout


class ProgressCheck:
    """Calls `on_stall`, once, when none of the workers has progressed for so long. Lasts until `end`.

    Without contact to one of them nothing is known, so that time does not count.
    """

    def __init__(
        self,
        loads: WorkerLoads,
        has_contact: Callable[[str], bool],
        workers: tuple[str, ...],
        timeout_s: float,
        on_stall: Callable[[WorkerStalled], None],
    ) -> None:
        self._loads = loads
        self._has_contact = has_contact
        self._workers = workers
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._began_at = loads.clock()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(timeout_s, self._check)

    def end(self) -> None:
        """Idempotent."""
        self._timer.cancel()

    def _check(self) -> None:
        if not all(map(self._has_contact, self._workers)):
            self._began_at = self._loads.clock()
        latest = max(self._began_at, *(self._loads[worker].progressed_at for worker in self._workers))
        if self._loads.clock() - latest < self._timeout_s:
            self._timer = self._loop.call_later(self._timeout_s / _CHECKS, self._check)
            return
        names = " and ".join(self._workers)
        text = f"{names} made no progress for {self._timeout_s:g} s"
        self._on_stall(WorkerStalled(text, workers=self._workers))
