"""Runs one scenario under one policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.measuring.quantile import quantile
from bench.simulator.clock import Clock
from bench.simulator.policies.fleet import Job, SimulatedFleet, WorkerModel
from bench.simulator.policies.policies import SimulatedPolicy, policy
from bench.simulator.policies.workload import Workload, arrivals
from cluster.config.router import PlacementConfig


@dataclass(frozen=True)
class Scenario:
    """A fleet, its load, and what happens to it."""

    workload: Workload
    num_workers: int = 64
    model: WorkerModel = field(default_factory=WorkerModel)
    lost_workers: int = 0  # gone for good at half time
    restart_s: float = 0.0  # how long each worker is away, one after the other; 0: no restarts


@dataclass(frozen=True)
class Result:
    """What a policy made of a scenario."""

    requests: int
    distinct_adapters: int
    cold_loads: int
    queue_p50_s: float  # from the arrival to the begin of the prefill, a cold load included
    queue_p99_s: float
    balance: float  # busiest worker / mean, by time spent on prompts
    moved: int  # requests of lost workers that were placed again

    def described(self) -> dict[str, Any]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def simulate(scenario: Scenario, name: str, *, seed: int = 1, config: PlacementConfig | None = None) -> Result:
    """Run a scenario to its last request."""
    clock, waits = Clock(), []

    def read(job: Job, waited_s: float) -> None:
        assert job.hold is not None
        job.hold.read_begins()
        waits.append(waited_s)

    fleet = SimulatedFleet(scenario.num_workers, scenario.model, clock, read)
    chosen = policy(name, fleet, clock, seed, config or PlacementConfig())
    run = _Run(scenario, clock, fleet, chosen)
    run.schedule_losses()
    adapters, num_requests = set(), 0
    for arrival in arrivals(scenario.workload, seed):
        clock.run_until(arrival.at_s)
        adapters.add(arrival.adapter)
        num_requests += 1
        run.place(Job(f"sha256:{arrival.adapter:064x}", arrival.prompt_tokens, arrival.decode_s, arrival.at_s))
    clock.run_out()
    busy = [worker.busy_s for worker in fleet.workers.values()]
    return Result(
        num_requests,
        len(adapters),
        sum(worker.num_loads for worker in fleet.workers.values()),
        quantile(waits, 0.5),
        quantile(waits, 0.99),
        max(busy) / (sum(busy) / len(busy)),
        run.num_moved,
    )


class _Run:
    def __init__(self, scenario: Scenario, clock: Clock, fleet: SimulatedFleet, policy: SimulatedPolicy) -> None:
        self._scenario, self._clock, self._fleet, self._policy = scenario, clock, fleet, policy
        self.num_moved = 0

    def place(self, job: Job) -> None:
        view, job.hold = self._policy.place(job)
        self._fleet.workers[view.name].take(job)

    def schedule_losses(self) -> None:
        names, duration_s = list(self._fleet.workers), self._scenario.workload.duration_s
        for name in names[: self._scenario.lost_workers]:
            self._clock.after(duration_s / 2, self._loss(name))
        if self._scenario.restart_s:
            pause_s = duration_s / (len(names) + 1)
            for i, name in enumerate(names):
                self._clock.after((i + 1) * pause_s, self._loss(name))
                self._clock.after((i + 1) * pause_s + self._scenario.restart_s, self._return(name))

    def _loss(self, name: str) -> Callable[[], None]:
        def lose() -> None:
            self._fleet.set_ready(name, False)
            for job in self._fleet.workers[name].lose():
                assert job.hold is not None
                job.hold.release()
                self.num_moved += 1
                self.place(job)

        return lose

    def _return(self, name: str) -> Callable[[], None]:
        return lambda: self._fleet.set_ready(name, True)
