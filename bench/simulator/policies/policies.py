"""The placement policies that a simulation compares: Prelude's, and common ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from random import Random
from typing import Protocol

from bench.simulator.clock import Clock
from bench.simulator.policies.fleet import Job, SimulatedFleet
from cluster.config.router import PlacementConfig
from router.fleet.fleet_state import FleetState, WorkerView
from router.fleet.homes import Homes
from router.fleet.worker_loads import Hold
from router.placement.placer import Placer
from router.placement.request import FailedAttempts, PlacementRequest, PromptSize


class SimulatedPolicy(Protocol):
    """Chooses the worker of a job and counts the job there."""

    def place(self, job: Job) -> tuple[WorkerView, Hold]: ...


class Affinity:
    """Prelude's placement."""

    def __init__(self, fleet: SimulatedFleet, clock: Clock, random: Random, config: PlacementConfig) -> None:
        self._fleet = fleet
        self._placer = Placer(config, fleet.loads, clock=clock, random=random)

    def place(self, job: Job) -> tuple[WorkerView, Hold]:
        size = PromptSize(job.prompt_tokens, job.prompt_tokens)
        request = self._placer.observe(PlacementRequest(job.revision_id, size=size))
        placement = self._placer.place(request, self._fleet.state, FailedAttempts())
        assert placement is not None
        placed = self._placer.take(request, placement)
        name = placement.prefill.name
        if job.revision_id not in self._fleet.workers[name].residency.host:
            self._placer.loaded(placed, self._fleet.model.load_s)
        return placement.prefill, placed.holds[0]


Chooser = Callable[[Job, FleetState], WorkerView]


class Simple:
    """A placement that is one function of the fleet's state."""

    def __init__(self, fleet: SimulatedFleet, choose: Chooser) -> None:
        self._fleet, self._choose = fleet, choose

    def place(self, job: Job) -> tuple[WorkerView, Hold]:
        worker = self._choose(job, self._fleet.state)
        return worker, self._fleet.loads.hold(worker.name, prompt_tokens=job.prompt_tokens)


def _random(random: Random) -> Chooser:
    return lambda _, state: random.choice(state.readers)


def _round_robin(_: Random) -> Chooser:
    numbers = count()
    return lambda _, state: state.readers[next(numbers) % len(state.readers)]


def _fewest_in_flight(_: Random) -> Chooser:
    return lambda _, state: min(state.readers, key=lambda worker: (state.loads[worker.name].num_sequences, worker.name))


def _consistent_hashing(_: Random) -> Chooser:
    """Every adapter has one worker, whatever its load."""

    def choose(job: Job, state: FleetState) -> WorkerView:
        homes: Homes = state.homes
        return state.readers[homes.order(job.revision_id)[0]]

    return choose


def _resident_first(_: Random) -> Chooser:
    """The worker with the fewest in flight of those that have the adapter; of all, if none has."""

    def choose(job: Job, state: FleetState) -> WorkerView:
        holders = [worker for worker in state.readers if job.revision_id in worker.residency.host]
        return min(holders or state.readers, key=lambda each: (state.loads[each.name].num_sequences, each.name))

    return choose


SIMPLE: dict[str, Callable[[Random], Chooser]] = {
    "random": _random,
    "round_robin": _round_robin,
    "fewest_in_flight": _fewest_in_flight,
    "consistent_hashing": _consistent_hashing,
    "resident_first": _resident_first,
}
POLICIES = ("prelude", *SIMPLE)


def policy(name: str, fleet: SimulatedFleet, clock: Clock, seed: int, config: PlacementConfig) -> SimulatedPolicy:
    """The policy of that name, for one fleet."""
    random = Random(seed)
    if name == "prelude":
        return Affinity(fleet, clock, random, config)
    return Simple(fleet, SIMPLE[name](random))
