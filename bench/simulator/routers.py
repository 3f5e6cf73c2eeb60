"""The routers of a simulated cluster: the real placement over the real bookkeeping, with what each of them knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from types import MappingProxyType

from bench.simulator.attempt import SimulatedRequest
from bench.simulator.clock import Clock
from bench.simulator.worker import INCARNATION, Worker
from router.fleet.fleet_state import FleetState, Holders, WorkerView
from router.fleet.worker_loads import WorkerLoads
from router.placement.placer import Placer
from router.placement.policy import PlacementConfig
from router.placement.request import FailedAttempts, Placement

_NO_FAILURE = FailedAttempts()


class Router:
    """One router: it counts its own requests, and hears of residency and of memory in use from the workers."""

    def __init__(
        self,
        clock: Clock,
        random: Random,
        config: PlacementConfig,
        holders: Holders,
        views: Mapping[str, WorkerView],
    ) -> None:
        self.loads = WorkerLoads(clock)
        self.placer = Placer(config, self.loads, clock=clock, random=random)
        self.state = FleetState(views, self.loads, holders)

    def place(self, request: SimulatedRequest) -> Placement:
        found = self.placer.place(request.placement_request, self.state, _NO_FAILURE)
        assert found is not None, "every worker is ready and every pair is warm"
        return found


def views_of(workers: Iterable[Worker]) -> Mapping[str, WorkerView]:
    """All workers as routers see them."""
    workers = list(workers)
    warm = frozenset((each.name, INCARNATION) for each in workers if each.role == "decode")
    return MappingProxyType({each.name: each.view(warm) for each in workers})
