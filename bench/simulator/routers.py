"""The routers of a simulated cluster: the real placement over the real bookkeeping, with what each of them knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from types import MappingProxyType

from bench.simulator.attempt import SimulatedRequest
from bench.simulator.clock import Clock
from bench.simulator.worker import Worker
from router.fleet.fleet_state import FleetState, Holders, WorkerView
from router.fleet.saturation import decode_load, prefill_queue_s
from router.fleet.worker_loads import WorkerLoads
from router.placement.placer import Placer
from router.placement.request import Placement


class Router:
    """One router: it counts its own requests, and hears of residency and of memory in use from the workers."""

    def __init__(self, clock: Clock, random: Random, holders: Holders) -> None:
        self.loads = WorkerLoads(clock)
        self.placer = Placer(self.loads, clock=clock, random=random)
        self._holders = holders
        self.state = FleetState({}, self.loads, holders)

    def refresh(self, views: Mapping[str, WorkerView]) -> None:
        self.state = FleetState(views, self.loads, self._holders)

    def place(self, request: SimulatedRequest) -> Placement | None:
        return self.placer.place(request.placement_request, self.state, request.failed)

    # The metrics for autoscalers (docs/placement.md).

    def prefill_queue_s(self) -> float:
        return prefill_queue_s(self.state)

    def decode_load(self) -> float:
        return decode_load(self.state)


def views_of(workers: Iterable[Worker]) -> Mapping[str, WorkerView]:
    """All workers as routers see them."""
    workers = list(workers)
    warm = frozenset((each.name, str(each.incarnation)) for each in workers if each.role == "decode")
    return MappingProxyType({each.name: each.view(warm) for each in workers})
