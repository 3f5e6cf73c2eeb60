"""Which workers a request goes to: a pure function, so that it can be simulated and tested without a fleet."""

from __future__ import annotations

from dataclasses import dataclass

from adapters.catalog.records import AdapterRevision
from router.fleet_state import FleetState, WorkerView


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placement may know of a request."""

    revision_id: str | None  # None: the base model
    positions: str = "prefill"  # of the tokens that the revision acts on; "all": what no pair can serve

    @classmethod
    def of(cls, revision: AdapterRevision | None) -> PlacementRequest:
        return cls(revision.revision_id, revision.manifest.positions) if revision else cls(None)


@dataclass(frozen=True, slots=True)
class Placement:
    """Who reads the prompt and who generates: a pair, which ships KV, or one unified worker in both places."""

    prefill: WorkerView
    decode: WorkerView

    @property
    def is_unified(self) -> bool:
        return self.prefill.name == self.decode.name

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """Each worker once; the one that reads the prompt is the first."""
        return (self.prefill,) if self.is_unified else (self.prefill, self.decode)

    def __str__(self) -> str:
        return ">".join(worker.name for worker in self.workers)


def rank_placements(request: PlacementRequest, fleet: FleetState) -> list[Placement]:
    """Those that can take the request now, best first: fewest of this router's requests in flight, then by name."""
    placeable = [worker for worker in fleet.workers.values() if worker.is_placeable]
    placements = [Placement(worker, worker) for worker in placeable if worker.role == "unified"]
    if request.positions != "all":
        placements += [
            Placement(prefill, decode)
            for prefill in placeable
            if prefill.role == "prefill"
            for decode in placeable
            if decode.role == "decode" and prefill.is_warm_with(decode)
        ]

    def load(placement: Placement) -> tuple[int, str, str]:
        in_flight = sum(fleet.in_flight.get(worker.name, 0) for worker in placement.workers)
        return in_flight, placement.prefill.name, placement.decode.name

    return sorted(placements, key=load)


def lacks_unified_worker(request: PlacementRequest, fleet: FleetState) -> bool:
    """True when the cluster can never take the request: it needs a role that no worker has, ready or not."""
    return request.positions == "all" and all(worker.role != "unified" for worker in fleet.workers.values())
