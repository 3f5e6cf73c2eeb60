"""Simulated workers: a queue of prompts, cold loads, host memory with least-recently-used eviction."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import MappingProxyType

from cluster.control import control_pb2 as pb
from router.fleet.fleet_state import FleetState, WorkerView
from router.fleet.holders import Holders
from router.fleet.worker_loads import Hold, WorkerLoads
from router.fleet.worker_residency import WorkerResidency


@dataclass(frozen=True)
class WorkerModel:
    """What simulated workers can do."""

    tokens_per_s: float = 8000.0  # of prompts
    host_adapters: int = 250  # that fit in host memory
    load_s: float = 0.2  # of a cold adapter
    parallel_loads: int = 8
    report_delay_s: float = 0.02  # until the router knows of a change in residency


class Clock:
    """Simulated time and what happens in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def __call__(self) -> float:
        return self.now

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), event))

    def run_until(self, end_s: float) -> None:
        while self._events and self._events[0][0] <= end_s:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end_s

    def run_out(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.run_until(self._events[0][0])


@dataclass(slots=True)
class Job:
    """A request at a worker."""

    revision_id: str
    prompt_tokens: int
    decode_s: float
    arrived_s: float
    hold: Hold | None = None
    num_moves: int = 0  # from workers that were lost


class SimulatedWorker:
    """Reads one prompt at a time, in the order in which their adapters are resident."""

    def __init__(
        self, name: str, model: WorkerModel, clock: Clock, on_read: Callable[[Job, float], None], holders: Holders
    ) -> None:
        self.name = name
        self.residency = WorkerResidency(holders)
        self.num_loads = 0
        self.busy_s = 0.0
        self._model, self._clock, self._on_read = model, clock, on_read
        self._host: OrderedDict[str, None] = OrderedDict()
        self._waiting: dict[str, list[Job]] = {}  # for the load of their revision
        self._load_queue: deque[str] = deque()
        self._num_loading = 0
        self._queue: deque[Job] = deque()
        self._reading: Job | None = None
        self._life = 0  # a restart makes the events of an earlier life void

    def take(self, job: Job) -> None:
        if job.revision_id in self._host:
            self._host.move_to_end(job.revision_id)
            self._enqueue(job)
        elif job.revision_id in self._waiting:
            self._waiting[job.revision_id].append(job)
        else:
            self._waiting[job.revision_id] = [job]
            self._load_queue.append(job.revision_id)
            self._load()

    def lose(self) -> list[Job]:
        """End: everything in host memory is lost. The jobs that it had are returned."""
        self._life += 1
        jobs = [*self._queue, *(job for waiting in self._waiting.values() for job in waiting)]
        if self._reading is not None:
            jobs.append(self._reading)
        self._host.clear()
        self._waiting.clear()
        self._load_queue.clear()
        self._queue.clear()
        self._num_loading, self._reading = 0, None
        self.residency.apply(pb.ResidencyDelta(snapshot=True))
        return jobs

    def _load(self) -> None:
        while self._load_queue and self._num_loading < self._model.parallel_loads:
            revision_id, life = self._load_queue.popleft(), self._life
            self._num_loading += 1
            self.num_loads += 1
            self._clock.after(self._model.load_s, partial(self._loaded, revision_id, life))

    def _loaded(self, revision_id: str, life: int) -> None:
        if life != self._life:
            return
        self._num_loading -= 1
        self._host[revision_id] = None
        evicted = [self._host.popitem(last=False)[0]] if len(self._host) > self._model.host_adapters else []
        self._report(pb.ResidencyDelta(resident=[revision_id], evicted=evicted))
        for job in self._waiting.pop(revision_id):
            self._enqueue(job)
        self._load()

    def _report(self, delta: pb.ResidencyDelta) -> None:
        life = self._life

        def arrive() -> None:
            if life == self._life:
                self.residency.apply(delta)

        self._clock.after(self._model.report_delay_s, arrive)

    def _enqueue(self, job: Job) -> None:
        self._queue.append(job)
        if self._reading is None:
            self._read()

    def _read(self) -> None:
        if not self._queue:
            return
        job, life = self._queue.popleft(), self._life
        self._reading = job
        seconds = job.prompt_tokens / self._model.tokens_per_s
        self.busy_s += seconds
        self._on_read(job, self._clock.now - job.arrived_s)
        self._clock.after(seconds, lambda: self._end(job, life))

    def _end(self, job: Job, life: int) -> None:
        if life != self._life:
            return
        self._reading = None
        if job.hold is not None:
            job.hold.read_ended()
            self._clock.after(job.decode_s, job.hold.release)
        self._read()


class SimulatedFleet:
    """Equal unified workers, and the router's view of them."""

    def __init__(self, num_workers: int, model: WorkerModel, clock: Clock, on_read: Callable[[Job, float], None]):
        self._holders = Holders()
        names = [f"w{i:03d}" for i in range(num_workers)]
        self.workers = {name: SimulatedWorker(name, model, clock, on_read, self._holders) for name in names}
        self.model = model
        self.loads = WorkerLoads(clock)
        self._views = {
            name: WorkerView(
                name,
                "unified",
                incarnation="1",
                is_connected=True,
                is_engine_up=True,
                is_ready=True,
                residency=worker.residency,
            )
            for name, worker in self.workers.items()
        }
        self.state = self._snapshot()

    def set_ready(self, name: str, ready: bool) -> None:
        """Whether a worker takes requests."""
        self._views[name] = replace(self._views[name], is_ready=ready)
        self.state = self._snapshot()

    def _snapshot(self) -> FleetState:
        return FleetState(MappingProxyType(dict(self._views)), self.loads, self._holders)
