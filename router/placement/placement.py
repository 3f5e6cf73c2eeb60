"""Picks the workers that serve a request: a pure function, so it can be simulated and tested without a fleet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from heapq import nsmallest

from router.fleet.fleet_state import FleetState, WorkerView
from router.fleet.homes import Homes
from router.fleet.worker_loads import WorkerLoad
from router.placement.decode_choice import choose_decode
from router.placement.policy import Policy
from router.placement.request import FailedAttempts, Placement, PlacementRequest
from router.placement.scorers.scorer import Candidate, Choice

_FEW = 8  # readers that are all scored; of more, those that can win
_FEW_COPIES = 4  # of a revision or a prompt's beginning
_NUM_SPARE_HOMES = 2  # for homes that are full
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


@dataclass(slots=True)
class _Readers:
    """The workers that can read one prompt. All sequences have one order."""

    workers: Sequence[WorkerView]
    loads: Sequence[WorkerLoad]
    resident: Sequence[Set[str]]  # revision ids in host memory
    homes: Homes
    queues_s: list[float]

    @classmethod
    def of(cls, request: PlacementRequest, fleet: FleetState, excluded: Set[str] = frozenset()) -> _Readers:
        if request.positions != "all" and request.is_stored and not excluded:
            loads = fleet.reader_loads
            return cls(fleet.readers, loads, fleet.reader_residencies, fleet.homes, _queues_s(loads))
        workers = [
            worker
            for worker in fleet.readers
            if worker.name not in excluded
            and (request.positions != "all" or worker.role == "unified")
            and request.can_be_read_by(worker)
        ]
        names = [worker.name for worker in workers]
        residencies = [worker.residency.host for worker in workers]
        chosen = [fleet.loads[name] for name in names]
        return cls(workers, chosen, residencies, Homes(names), _queues_s(chosen))


def _queues_s(loads: Sequence[WorkerLoad]) -> list[float]:
    return [load.prompt_tokens * load.s_per_token for load in loads]  # as `queue_s`, for every worker at every request


def place(
    request: PlacementRequest, fleet: FleetState, policy: Policy, failed: FailedAttempts = _NOBODY
) -> Placement | None:
    """The best placement that can take the request now, None if there is none.

    First the worker that reads the prompt, by expected time to the first token; then, for a prefill worker, the decode
    worker by free KV memory. Placements without a failed worker come first.
    """
    nobody: Set[str] = frozenset()
    distrusted = failed.workers
    # Readers and decode workers to leave out: first all that have failed, in the last resort none.
    rounds = ((distrusted, distrusted), (distrusted, nobody), (nobody, distrusted)) if distrusted else ()
    for no_readers, no_decodes in (*rounds, (nobody, nobody)):
        readers = _Readers.of(request, fleet, no_readers)
        if (placement := _first(request, fleet, policy, readers, failed, no_decodes)) is not None:
            return placement
    return None


def rank(request: PlacementRequest, fleet: FleetState, policy: Policy) -> list[Ranked]:
    """Every worker that can read the prompt, the best first, with the costs that `place` compares."""
    readers = _Readers.of(request, fleet)
    return _ranked(request, policy, readers) if readers.workers else []


def placements(request: PlacementRequest, fleet: FleetState) -> Iterator[Placement]:
    """Every placement that can take the request now, by name."""
    for reader in _Readers.of(request, fleet).workers:
        if reader.role in request.single_roles:
            yield Placement(reader, reader)
        elif request.positions != "all" and request.needs_decode:
            yield from (Placement(reader, decode) for decode in fleet.warm_decodes(reader))


def _first(
    request: PlacementRequest,
    fleet: FleetState,
    policy: Policy,
    readers: _Readers,
    failed: FailedAttempts,
    no_decodes: Set[str],
) -> Placement | None:
    """The placement of the best reader that has one."""
    everybody: Sequence[int] = range(len(readers.workers))
    rounds = [everybody] if len(everybody) <= _FEW else [_shortlist(request, fleet, policy, readers), everybody]
    for indices in rounds if everybody else ():  # everybody again: no shortlisted one may have a decode worker
        for index in _by_cost(request, policy, readers, indices):
            reader = readers.workers[index]
            if (placement := _completed(reader, request, fleet, failed, no_decodes)) is not None:
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


def _by_cost(request: PlacementRequest, policy: Policy, readers: _Readers, indices: Sequence[int]) -> list[int]:
    """These indices, the best reader's first."""
    candidates, choice = _candidates(request, policy, readers, indices)
    found = []
    for index, candidate in zip(indices, candidates, strict=True):
        cost_s = 0.0
        for weight, scorer in policy.scorers:
            cost_s += weight * scorer.cost_s(candidate, choice)
        found.append((cost_s, candidate.rank, candidate.worker.name, index))
    found.sort()
    return [each[3] for each in found]


def _ranked(request: PlacementRequest, policy: Policy, readers: _Readers) -> list[Ranked]:
    """All readers, the best first, with what each scorer says."""
    candidates, choice = _candidates(request, policy, readers, range(len(readers.workers)))
    ranked = []
    for candidate in candidates:
        parts = tuple(weight * scorer.cost_s(candidate, choice) for weight, scorer in policy.scorers)
        ranked.append(Ranked(candidate, sum(parts), parts))
    return sorted(ranked, key=lambda each: (each.cost_s, each.candidate.rank, each.worker.name))


def _candidates(
    request: PlacementRequest, policy: Policy, readers: _Readers, indices: Sequence[int]
) -> tuple[list[Candidate], Choice]:
    """The readers at these indices, and what they have in common."""
    revision_id = request.revision_id
    order = _order(request, policy, readers)
    ranks = {index: position for position, index in enumerate(order)}
    choice = _choice(request, policy, readers, order)
    candidates = []
    for index in indices:
        load = readers.loads[index]
        has_revision = revision_id in readers.resident[index] or revision_id in load.revisions
        choice.num_copies += has_revision
        candidates.append(Candidate(readers.workers[index], load, ranks.get(index, len(order)), has_revision))
    return candidates, choice


def _choice(request: PlacementRequest, policy: Policy, readers: _Readers, order: Sequence[int]) -> Choice:
    """What the candidates have in common: how long queues are, and how far the revision's homes reach."""
    queues_s = readers.queues_s
    mean_queue_s = sum(queues_s) / len(queues_s)
    read_s = request.size.prompt_tokens * readers.loads[order[0]].s_per_token
    full_queue_s = policy.load_bound * mean_queue_s + policy.slack_prompts * read_s
    num_wanted = missing = policy.num_homes(request)
    num_homes = 0
    for index in order:  # a full home is replaced by the next one
        num_homes += 1
        missing -= queues_s[index] <= full_queue_s
        if not missing:
            break
    return Choice(request, read_s, full_queue_s, num_homes, num_wanted)


def _order(request: PlacementRequest, policy: Policy, readers: _Readers) -> Sequence[int]:
    """Indices into `readers`: the revision's homes; for the base model, which all have, a random start."""
    if request.revision_id is not None and policy.uses_homes:
        return readers.homes.order(request.revision_id)
    first = request.nonce % len(readers.workers)
    return (first,)


def _shortlist(request: PlacementRequest, fleet: FleetState, policy: Policy, readers: _Readers) -> Sequence[int]:
    """Indices of the readers that can win: homes, holders, those with the prompt's beginning, the least loaded."""
    revision_id = request.revision_id
    everybody: Sequence[int] = range(len(readers.workers))
    if request.needs_decode and (cold := fleet.cold_prefills):
        everybody = [index for index in everybody if readers.workers[index].name not in cold] or everybody
    queues = readers.queues_s
    chosen = {min(everybody, key=queues.__getitem__), everybody[request.nonce % len(everybody)]}
    if revision_id is not None:
        order = _order(request, policy, readers)
        homes = _choice(request, policy, readers, order).num_homes
        chosen.update(order[: max(homes, policy.num_homes(request) + _NUM_SPARE_HOMES)])
        chosen.update(_least_loaded([index for index in everybody if revision_id in readers.resident[index]], queues))
    if names := policy.prefixes.workers(request):
        chosen.update(_least_loaded([i for i in everybody if readers.workers[i].name in names], queues))
    return tuple(chosen)


def _least_loaded(indices: list[int], queues: list[float]) -> list[int]:
    return indices if len(indices) <= _FEW_COPIES else nsmallest(_FEW_COPIES, indices, key=queues.__getitem__)
