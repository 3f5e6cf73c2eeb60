"""Picks the workers that serve a request: a pure function, so it can be simulated and tested without a fleet."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from router.fleet.fleet_state import FleetState, WorkerView
from router.placement.decode_choice import choose_decode
from router.placement.policy import Policy
from router.placement.readers import Readers, can_read
from router.placement.request import FailedAttempts, Placement, PlacementRequest
from router.placement.scorers.scorer import Candidate

_NOBODY = FailedAttempts()


@dataclass(slots=True)
class Ranked:
    """A worker that can read the prompt, and what that is expected to cost."""

    candidate: Candidate
    cost_s: float
    parts: tuple[float, ...]  # by scorer, in the policy's order

    @property
    def worker(self) -> WorkerView:
        return self.candidate.worker


def place(
    request: PlacementRequest, fleet: FleetState, policy: Policy, failed: FailedAttempts = _NOBODY
) -> Placement | None:
    """The best placement that can take the request now, None if there is none.

    Picks the worker that reads the prompt by expected time to first token; then, for a prefill worker, the decode
    worker by free KV memory. Placements without a failed worker are preferred.
    """
    nobody: Set[str] = frozenset()
    distrusted = failed.workers
    # Readers and decode workers to leave out: first all that have failed, in the last resort none.
    rounds = ((distrusted, distrusted), (distrusted, nobody), (nobody, distrusted)) if distrusted else ()
    for no_readers, no_decodes in (*rounds, (nobody, nobody)):
        readers = Readers(request, fleet, policy, no_readers)
        if (placement := _first(request, fleet, readers, failed, no_decodes)) is not None:
            return placement
    return None


def rank(request: PlacementRequest, fleet: FleetState, policy: Policy) -> list[Ranked]:
    """Every worker that can read the prompt, best first, with the costs that `place` compares."""
    readers = Readers(request, fleet, policy)
    ranked = []
    for index in readers.ranked():
        candidate = readers.candidate(index)
        parts = tuple(weight * scorer.cost_s(candidate, readers.choice) for weight, scorer in policy.scorers)
        ranked.append(Ranked(candidate, sum(parts), parts))
    return ranked


def placements(request: PlacementRequest, fleet: FleetState) -> Iterator[Placement]:
    """Every placement that can take the request now, by name."""
    for reader in fleet.readers:
        if not can_read(reader, request):
            continue
        if reader.role in request.single_roles:
            yield Placement(reader, reader)
        elif request.positions != "all" and request.needs_decode:
            yield from (Placement(reader, decode) for decode in fleet.warm_decodes(reader))


def _first(
    request: PlacementRequest, fleet: FleetState, readers: Readers, failed: FailedAttempts, no_decodes: Set[str]
) -> Placement | None:
    """The placement of the best reader that has one."""
    for index in readers.best_first():
        if (placement := _completed(readers.workers[index], request, fleet, failed, no_decodes)) is not None:
            return placement
    return None


def _completed(
    reader: WorkerView, request: PlacementRequest, fleet: FleetState, failed: FailedAttempts, no_decodes: Set[str]
) -> Placement | None:
    """The placement with the best decode worker, None if every possible one has failed."""
    if reader.role in request.single_roles:
        placement = Placement(reader, reader)
        return None if placement.key in failed.placements else placement
    if not failed.placements and not no_decodes:
        decode = choose_decode(request, reader, fleet)
    else:

        def may_serve(decode: WorkerView) -> bool:
            return decode.name not in no_decodes and Placement(reader, decode).key not in failed.placements

        decode = choose_decode(request, reader, fleet, may_serve)
    return None if decode is None else Placement(reader, decode)
