"""A simulated worker's host memory: cold loads, least-recently-used eviction, reports to the router."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from bench.simulator.clock import Clock
from cluster.control import control_pb2 as pb
from router.fleet.fleet_state import Holders, WorkerResidency

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadModel:
    """How adapters reach host memory, and how many fit."""

    host_adapters: int = 250
    store_s: float = 0.2  # a load from the store, alone
    parallel: int = 8  # loads at a time
    report_delay_s: float = 0.02  # until the routers know of a change
    serial_s: float = 0.0  # of each load that no other one overlaps: two at once end this far apart


class AdapterMemory(Generic[T]):
    """The adapters of one worker. Requests of type T wait here for theirs."""

    def __init__(self, model: LoadModel, clock: Clock, holders: Holders, on_resident: Callable[[T], None]) -> None:
        self.residency = WorkerResidency(holders)
        self.num_loads = 0
        self._model, self._clock, self._on_resident = model, clock, on_resident
        self._host: OrderedDict[str, None] = OrderedDict()
        self._waiting: dict[str, list[T]] = {}  # for the load of their revision
        self._load_queue: deque[str] = deque()
        self._num_loading = 0
        self._last_end_s = 0.0  # of the loads begun so far
        self._life = 0  # a restart makes the events of an earlier life void

    def ensure(self, revision_id: str, request: T) -> bool:
        """Call `on_resident` once the revision is in host memory, at once if it is. Returns whether it was."""
        if revision_id in self._host:
            self._host.move_to_end(revision_id)
            self._on_resident(request)
            return True
        waiting = self._waiting.get(revision_id)
        if waiting is not None:
            waiting.append(request)
        else:
            self._waiting[revision_id] = [request]
            self._load_queue.append(revision_id)
            self._load()
        return False

    def fill(self, revision_ids: Iterable[str]) -> None:
        """Make these resident now, as if they had been loaded before. Raises ValueError if they do not fit."""
        ids = list(revision_ids)
        if len(self._host) + len(ids) > self._model.host_adapters:
            raise ValueError(f"{len(ids)} adapters more do not fit in memory for {self._model.host_adapters}")
        self._host.update(dict.fromkeys(ids))
        self.residency.apply(pb.ResidencyDelta(resident=ids))

    def lose(self) -> list[T]:
        """Everything in memory is lost. The requests that waited are returned."""
        self._life += 1
        waiting = [request for requests in self._waiting.values() for request in requests]
        self._host.clear()
        self._waiting.clear()
        self._load_queue.clear()
        self._num_loading, self._last_end_s = 0, 0.0
        self.residency.apply(pb.ResidencyDelta(snapshot=True))
        return waiting

    def _load(self) -> None:
        model, clock = self._model, self._clock
        while self._load_queue and self._num_loading < model.parallel:
            revision_id = self._load_queue.popleft()
            self._num_loading += 1
            self.num_loads += 1
            end_s = max(clock.now + model.store_s, self._last_end_s + model.serial_s)
            self._last_end_s = end_s
            clock.after(end_s - clock.now, self._loaded, revision_id, self._life)

    def _loaded(self, revision_id: str, life: int) -> None:
        if life != self._life:
            return
        self._num_loading -= 1
        self._host[revision_id] = None
        evicted = [self._host.popitem(last=False)[0]] if len(self._host) > self._model.host_adapters else []
        delta = pb.ResidencyDelta(resident=[revision_id], evicted=evicted)
        self._clock.after(self._model.report_delay_s, self._report, delta, life)
        for request in self._waiting.pop(revision_id):
            self._on_resident(request)
        self._load()

    def _report(self, delta: pb.ResidencyDelta, life: int) -> None:
        if life == self._life:
            self.residency.apply(delta)
