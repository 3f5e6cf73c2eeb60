"""The routers of a simulated cluster: the real placement over the real bookkeeping, with what each of them knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random
from types import MappingProxyType

from bench.simulator.attempt import SimulatedRequest
from bench.simulator.clock import Clock
from bench.simulator.worker import Worker
from cluster.config.router import PlacementConfig
from router.fleet.fleet_state import FleetState, WorkerView
from router.fleet.holders import Holders
from router.fleet.saturation import decode_load, mean, prefill_queue_s
from router.fleet.worker_loads import WorkerLoads
from router.placement.placer import Placer
from router.placement.request import Placement


class Router:
    """One router: it counts its own requests, and hears of residency and of memory in use from the workers."""

    def __init__(
        self, clock: Clock, random: Random, config: PlacementConfig, holders: Holders, decode_reads_tokens: int
    ) -> None:
        self.loads = WorkerLoads(clock)
        self.placer = Placer(config, self.loads, clock=clock, random=random)
        self._holders = holders
        self._decode_reads_tokens = decode_reads_tokens
        self.state = FleetState({}, self.loads, holders)
        self._decodes_alone = self.state

    def refresh(self, views: Mapping[str, WorkerView], decodes_alone: Mapping[str, WorkerView]) -> None:
        self.state = FleetState(views, self.loads, self._holders)
        self._decodes_alone = FleetState(decodes_alone, self.loads, self._holders)

    def place(self, request: SimulatedRequest) -> Placement | None:
        """As the router does it; but short prompts for the base model go to decode workers alone, if that is tried."""
        asked = request.placement_request
        if asked.revision_id is None and request.prompt_tokens <= self._decode_reads_tokens:
            placement = self.placer.place(asked, self._decodes_alone, request.failed)
            if placement is not None:
                return placement
        return self.placer.place(asked, self.state, request.failed)

    # The metrics for autoscalers (docs/placement.md).

    def prefill_queue_s(self) -> float:
        return prefill_queue_s(self.state)

    def decode_load(self) -> float:
        return decode_load(self.state)

    # Those that autoscalers had before.

    def whole_queue_s(self) -> float:
        return mean([load.queue_s for load in self.state.reader_loads])

    def decode_kv_used(self) -> float:
        loads = [self.loads[view.name] for view in self.state.decodes]
        return mean([load.used_kv_tokens / load.max_kv_tokens for load in loads if load.max_kv_tokens])


def views_of(workers: Iterable[Worker]) -> tuple[Mapping[str, WorkerView], Mapping[str, WorkerView]]:
    """All workers as routers see them; and the decode workers as if each of them served alone."""
    workers = list(workers)
    warm = frozenset((each.name, str(each.incarnation)) for each in workers if each.role == "decode")
    views = {each.name: each.view(warm) for each in workers}
    alone = {name: replace(view, role="unified") for name, view in views.items() if view.role == "decode"}
    return MappingProxyType(views), MappingProxyType(alone)
