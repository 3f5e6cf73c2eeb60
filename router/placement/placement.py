"""Which workers a request goes to: a pure function, so that it can be simulated and tested without a fleet."""

from __future__ import annotations

from dataclasses import dataclass

from adapters.catalog.records import AdapterRevision
from router.fleet.fleet_state import FleetState, WorkerView


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placement may know of a request."""

    revision_id: str | None  # None: the base model
    positions: str = "prefill"  # of the tokens that the revision acts on; "all": what no pair can serve
    is_stored: bool = True  # False: a worker that does not have the revision cannot get it

    @classmethod
    def of(cls, revision: AdapterRevision | None) -> PlacementRequest:
        if revision is None:
            return cls(None)
        return cls(revision.revision_id, revision.manifest.positions, revision.stored)

    def can_be_read_by(self, worker: WorkerView) -> bool:
        """Whether the worker has the revision or can get it, as far as stores go."""
        return self.is_stored or self.revision_id is None or worker.residency.can_use_unstored(self.revision_id)


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
    readers = [worker for worker in placeable if request.can_be_read_by(worker)]
    placements = [Placement(worker, worker) for worker in readers if worker.role == "unified"]
    if request.positions != "all":
        placements += [
            Placement(prefill, decode)
            for prefill in readers
            if prefill.role == "prefill"
            for decode in placeable
            if decode.role == "decode" and prefill.is_warm_with(decode)
        ]

    def load(placement: Placement) -> tuple[int, str, str]:
        in_flight = sum(fleet.in_flight.get(worker.name, 0) for worker in placement.workers)
        return in_flight, placement.prefill.name, placement.decode.name

    return sorted(placements, key=load)


def is_gone(request: PlacementRequest, fleet: FleetState) -> bool:
    """True when a revision that no store has is in no worker's memory either: all that could have it say so."""
    if request.is_stored:
        return False
    roles = ("unified",) if request.positions == "all" else ("prefill", "unified")
    able = [worker for worker in fleet.workers.values() if worker.role in roles]
    return all(worker.is_connected and not request.can_be_read_by(worker) for worker in able)


def lacks_unified_worker(request: PlacementRequest, fleet: FleetState) -> bool:
    """True when the cluster can never take the request: it needs a role that no worker has, ready or not."""
    return request.positions == "all" and all(worker.role != "unified" for worker in fleet.workers.values())
