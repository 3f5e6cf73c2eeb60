"""Simulated workers: a queue of prompts, cold loads, host memory with least-recently-used eviction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

from bench.simulator.adapter_memory import AdapterMemory, LoadModel
from bench.simulator.clock import Clock
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

    @property
    def loads(self) -> LoadModel:
        return LoadModel(self.host_adapters, self.load_s, self.parallel_loads, self.report_delay_s)


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
        self.busy_s = 0.0
        self._memory: AdapterMemory[Job] = AdapterMemory(model.loads, clock, holders, self._enqueue)
        self._model, self._clock, self._on_read = model, clock, on_read
        self._queue: deque[Job] = deque()
        self._reading: Job | None = None
        self._life = 0  # a restart makes the events of an earlier life void

    @property
    def residency(self) -> WorkerResidency:
        return self._memory.residency

    @property
    def num_loads(self) -> int:
        return self._memory.num_loads

    def take(self, job: Job) -> None:
        self._memory.ensure(job.revision_id, job)

    def lose(self) -> list[Job]:
        """End: everything in host memory is lost. The jobs that it had are returned."""
        self._life += 1
        jobs = [*self._queue, *self._memory.lose()]
        if self._reading is not None:
            jobs.append(self._reading)
        self._queue.clear()
        self._reading = None
        return jobs

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
        self._clock.after(seconds, self._end, job, life)

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
