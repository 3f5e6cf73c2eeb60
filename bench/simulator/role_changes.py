"""Workers that change between prefill and decode, by what the routers' metrics for autoscalers say.

Tried in simulation only: no worker of Prelude changes its role.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from bench.simulator.clock import Clock
from bench.simulator.outcome import Outcome
from bench.simulator.routers import Router
from bench.simulator.scenario import RoleChanges
from bench.simulator.worker import Worker

_OTHER = {"prefill": "decode", "decode": "prefill"}


class Cluster(Protocol):
    """The simulation, as far as roles are concerned."""

    clock: Clock
    outcome: Outcome
    routers: list[Router]
    workers: dict[str, Worker]

    @property
    def is_going_on(self) -> bool: ...

    def refresh(self) -> None: ...

    def notice(self, workers: Iterable[Worker]) -> None: ...

    def come_back(self, workers: Iterable[Worker], role: str | None = None) -> None: ...


class RoleChanger:
    """One change at a time: a worker takes no more requests, ends those it has, and starts again in its new role."""

    def __init__(self, changes: RoleChanges, run: Cluster) -> None:
        self._changes, self._run = changes, run
        self._is_changing = False

    def begin(self) -> None:
        self._run.clock.after(self._changes.period_s, self._look)

    def _look(self) -> None:
        if not self._run.is_going_on:
            return
        if not self._is_changing and (role := self._wanted()) is not None:
            worker = self._least_used(_OTHER[role])
            if worker is not None:
                self._drain(worker, role)
        self._run.clock.after(self._changes.period_s, self._look)

    def _wanted(self) -> str | None:
        """The role of which one more would help, and one less of the other would not hurt."""
        changes, queue_s, load = self._changes, self._queue_s(), self._decode_load()
        if queue_s > changes.high_queue_s and load < changes.low_load:
            return "prefill"
        if load > changes.high_load and queue_s < changes.high_queue_s:
            return "decode"
        return None

    def _queue_s(self) -> float:
        """Each router knows its own requests."""
        return sum(router.prefill_queue_s() for router in self._run.routers)

    def _decode_load(self) -> float:
        return max(router.decode_load() for router in self._run.routers)

    def _least_used(self, role: str) -> Worker | None:
        """None if it is the last one of its role."""
        found = [each for each in self._run.workers.values() if each.role == role and each.is_known_up]
        return min(found, key=lambda each: (len(each.attempts), each.name)) if len(found) > 1 else None

    def _drain(self, worker: Worker, role: str) -> None:
        self._is_changing = True
        worker.is_known_up = False
        self._run.refresh()
        self._await_idle(worker, role, self._run.clock.now + self._changes.drain_s)

    def _await_idle(self, worker: Worker, role: str, deadline_s: float) -> None:
        clock = self._run.clock
        if worker.attempts and clock.now < deadline_s:
            clock.after(0.1, self._await_idle, worker, role, deadline_s)
            return
        worker.die()
        self._run.notice([worker])
        clock.after(self._changes.change_s, self._changed, worker, role)

    def _changed(self, worker: Worker, role: str) -> None:
        self._run.come_back([worker], role)
        self._run.outcome.num_changes += 1
        self._is_changing = False
