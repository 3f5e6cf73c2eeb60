"""Picks the workers that serve a request: a pure function, so it can be simulated and tested without a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adapters.catalog.records import AdapterRevision
from router.fleet.fleet_state import FleetState, WorkerView


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placement may know of a request."""

    revision_id: str | None  # None: the base model
    positions: str = "prefill"  # of the tokens that the revision acts on; "all" needs a unified worker
    is_stored: bool = True  # False: only workers that hold the revision can serve it
    needs_decode: bool = True  # False: its prompt is read and nothing is generated, so a prefill worker alone serves it

    @classmethod
    def of(cls, revision: AdapterRevision | None, *, needs_decode: bool = True) -> PlacementRequest:
        if revision is None:
            return cls(None, needs_decode=needs_decode)
        return cls(revision.revision_id, revision.manifest.positions, revision.stored, needs_decode)

    @property
    def single_roles(self) -> tuple[str, ...]:
        """The roles of workers that can serve the request alone."""
        if self.needs_decode or self.positions == "all":
            return ("unified",)
        return ("prefill", "unified")

    def can_be_read_by(self, worker: WorkerView) -> bool:
        """Whether the worker holds the revision or can fetch it, as far as the store is concerned."""
        return self.is_stored or self.revision_id is None or worker.residency.can_use_unstored(self.revision_id)


PlacementKey = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Placement:
    """A pair, whose prefill worker sends KV to its decode worker, or one worker in both places.

    One worker is a unified one, or a prefill worker where nothing is generated.
    """

    prefill: WorkerView
    decode: WorkerView

    @property
    def is_single(self) -> bool:
        return self.prefill.name == self.decode.name

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """Each worker once; the one that reads the prompt is the first."""
        return (self.prefill,) if self.is_single else (self.prefill, self.decode)

    @property
    def key(self) -> PlacementKey:
        """Equal for the same two engines only: a restarted engine has another incarnation."""
        return self.prefill.name, self.prefill.incarnation, self.decode.name, self.decode.incarnation

    def __str__(self) -> str:
        return ">".join(worker.name for worker in self.workers)


@dataclass(frozen=True, slots=True)
class FailedAttempts:
    """What failed for one sequence so far."""

    placements: frozenset[PlacementKey] = frozenset()  # never tried again
    workers: frozenset[str] = frozenset()  # the last resort

    def with_placement(self, placement: Placement) -> FailedAttempts:
        return replace(self, placements=self.placements | {placement.key})

    def with_worker(self, name: str) -> FailedAttempts:
        return replace(self, workers=self.workers | {name})


def place(request: PlacementRequest, fleet: FleetState, failed: FailedAttempts | None = None) -> Placement | None:
    """The best placement that can take the request now, None if there is none.

    Placements without a failed worker come first. Then the fewest of this router's requests in flight decides, then
    the name: for the prefill worker, for the decode worker given the prefill worker, and between the best pair and the
    best single worker. Linear in the number of workers, as long as most pairs are warm.
    """
    failed = failed or FailedAttempts()
    placeable = [worker for worker in fleet.workers.values() if worker.is_placeable]
    if failed.workers:
        trusted = [worker for worker in placeable if worker.name not in failed.workers]
        if (placement := _best_of(trusted, request, fleet, failed)) is not None:
            return placement
    return _best_of(placeable, request, fleet, failed)


def _best_of(
    workers: Sequence[WorkerView], request: PlacementRequest, fleet: FleetState, failed: FailedAttempts
) -> Placement | None:
    def cost(worker: WorkerView) -> tuple[bool, int, str]:
        return worker.name in failed.workers, fleet.in_flight.get(worker.name, 0), worker.name

    def total_cost(placement: Placement) -> tuple[int, int, str, str]:
        names = [worker.name for worker in placement.workers]
        num_failed = sum(name in failed.workers for name in names)
        in_flight = sum(fleet.in_flight.get(name, 0) for name in names)
        return num_failed, in_flight, placement.prefill.name, placement.decode.name

    def can_serve(prefill: WorkerView, decode: WorkerView) -> bool:
        has_failed = failed.placements and Placement(prefill, decode).key in failed.placements
        return not has_failed and (prefill is decode or prefill.is_warm_with(decode))

    readers = [worker for worker in workers if request.can_be_read_by(worker)]
    can_be_paired = request.needs_decode and request.positions != "all"
    decodes = [worker for worker in workers if worker.role == "decode"] if can_be_paired else []
    alone = (worker for worker in readers if worker.role in request.single_roles and can_serve(worker, worker))
    single = min(alone, key=cost, default=None)
    prefills = (p for p in readers if p.role == "prefill" and any(can_serve(p, decode) for decode in decodes))
    prefill = min(prefills, key=cost, default=None)

    candidates = []
    if single is not None:
        candidates.append(Placement(single, single))
    if prefill is not None:
        decode = min((decode for decode in decodes if can_serve(prefill, decode)), key=cost)
        candidates.append(Placement(prefill, decode))
    return min(candidates, key=total_cost, default=None)


def all_placements(request: PlacementRequest, fleet: FleetState) -> list[Placement]:
    """Every placement that can take the request now, fewest requests in flight first. Quadratic: for status pages."""
    placeable = [worker for worker in fleet.workers.values() if worker.is_placeable]
    readers = [worker for worker in placeable if request.can_be_read_by(worker)]
    placements = [Placement(worker, worker) for worker in readers if worker.role in request.single_roles]
    if request.needs_decode and request.positions != "all":
        placements += [
            Placement(prefill, decode)
            for prefill in readers
            if prefill.role == "prefill"
            for decode in placeable
            if decode.role == "decode" and prefill.is_warm_with(decode)
        ]

    def order(placement: Placement) -> tuple[int, str, str]:
        in_flight = sum(fleet.in_flight.get(worker.name, 0) for worker in placement.workers)
        return in_flight, placement.prefill.name, placement.decode.name

    return sorted(placements, key=order)
