"""Picks the workers that serve a request: a pure function, so it can be simulated and tested without a fleet.

The worker that reads the prompt is the one with the lowest expected time to first token. Of two random decode workers,
a pair gets the one with more free KV memory; the same domain is preferred.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from operator import attrgetter, itemgetter

from router.fleet.fleet_state import FleetState, WorkerView, homes_of
from router.fleet.worker_loads import WorkerLoad
from router.placement.policy import FIRST_HOMES, LOAD_BOUND, SLACK_PROMPTS, Candidate, Choice, Policy
from router.placement.request import FailedAttempts, Placement, PlacementRequest

_NUM_SPARE_HOMES = 2  # for homes that are full
_FEW_READERS = 8  # so many are all scored; of more, those that can win
_ROUNDING_S = 1e-9  # sums of the same costs in another order
_wait_s = attrgetter("wait_s")

Scored = tuple[float, int, str, int]  # cost in seconds, rank among the homes, name, index; the least is the best
_FEW_DECODES = 4  # so many are all compared
_NOBODY = FailedAttempts()


class PrefillCandidates:
    """The workers that can read one prompt. All sequences and indices have the order of `workers`."""

    def __init__(
        self, request: PlacementRequest, fleet: FleetState, policy: Policy, excluded: Set[str] = frozenset()
    ) -> None:
        self._request, self._policy = request, policy
        self.workers: Sequence[WorkerView] = fleet.readers
        self._loads: Sequence[WorkerLoad] = fleet.reader_loads
        self._disks: Sequence[Set[str]] = fleet.reader_disks
        self._unified = fleet.unified_loads if len(fleet.unified_loads) < len(fleet.readers) else ()
        if request.positions != "all" and request.is_stored and not excluded:
            self._copies = set() if request.revision_id is None else fleet.readers_with(request.revision_id)
            self._cold = fleet.cold_readers if request.needs_decode else frozenset()
            homes = fleet.homes
        else:
            indices = [
                i for i, worker in enumerate(fleet.readers) if worker.name not in excluded and can_read(worker, request)
            ]
            everywhere = set() if request.revision_id is None else fleet.readers_with(request.revision_id)
            self.workers = [fleet.readers[i] for i in indices]
            self._loads = [fleet.reader_loads[i] for i in indices]
            self._disks = [fleet.reader_disks[i] for i in indices]
            self._copies = {position for position, i in enumerate(indices) if i in everywhere}
            self._cold = frozenset()
            homes = homes_of(tuple(worker.name for worker in self.workers))
        self._homes = homes

    def best_first(self) -> Iterator[int]:
        """The indices of all readers, cheapest first. Scores readers lazily."""
        if len(self.workers) <= 1:  # nothing to compare
            yield from range(len(self.workers))
            return
        self._prepare()
        if len(self.workers) <= _FEW_READERS:
            yield from self._ranked()
            return
        first = min(self._contenders())[3]
        yield first
        yield from (index for index in self._ranked() if index != first)

    def score(self, index: int) -> Scored:
        candidate = self.candidate(index)
        return self._policy.cost_s(candidate, self.choice), candidate.rank, candidate.worker.name, index

    def candidate(self, index: int) -> Candidate:
        order = self._order
        rank = order.index(index) if index in order else len(order)
        return Candidate(self.workers[index], self._loads[index], rank, index in self._copies)

    def _prepare(self) -> None:
        """Compute what scoring needs: queue lengths, and the revision's homes and copies."""
        request, policy, loads = self._request, self._policy, self._loads
        self._queues_s = list(map(_wait_s, loads))
        revision_id = request.revision_id
        if revision_id is not None:
            self._order: Sequence[int] = self._homes.order(revision_id)
        else:  # all have the base model: a random start
            self._order = (request.nonce % len(self.workers),)
        if revision_id is not None:
            # Homes with a sequence in flight make sure of the revision. At others a load is not waited for.
            for index in self._order[: policy.num_homes(request) + _NUM_SPARE_HOMES]:
                if revision_id in loads[index].revisions:
                    self._copies.add(index)
        self.choice = self._choice()

    def _ranked(self) -> list[int]:
        return [index for *_, index in sorted(map(self.score, range(len(self.workers))))]

    def _choice(self) -> Choice:
        """What all candidates share: the queue statistics, and how far the revision's homes reach."""
        request, policy, queues_s = self._request, self._policy, self._queues_s
        mean_queue_s = sum(queues_s) / len(queues_s)
        read_s = request.size.prompt_tokens * self._loads[self._order[0]].s_per_token
        full_queue_s = LOAD_BOUND * mean_queue_s + SLACK_PROMPTS * read_s
        num_wanted = missing = policy.num_homes(request)
        num_homes = 0
        for index in self._order:  # a full home is replaced by the next one
            num_homes += 1
            missing -= queues_s[index] <= full_queue_s
            if not missing:
                break
        spared_s = policy.spared_beside_prefill(self._unified, read_s) if self._unified else 0.0
        return Choice(request, read_s, full_queue_s, num_homes, num_wanted, len(self._copies), spared_s)

    def _contenders(self) -> list[Scored]:
        """Scores of a subset of the readers that contains the best one, or the best with a warm decode worker.

        Likely readers are scored first. Any other reader costs at least its queue plus the scorers' lower bound, so it
        is scored only if its queue is short enough to win.
        """
        likely = self._likely() - self._cold or set(range(len(self.workers)))
        scored = list(map(self.score, likely))
        best_s, best_rank, _, _ = min(scored)
        least_s = self._policy.least_s(self.choice)
        limit_s = best_s - least_s + (_ROUNDING_S if least_s else 0.0)
        if limit_s < 0:
            return scored
        # Without that, who costs the same as one of the first homes loses to it by rank.
        num_ranked = min(len(self._order), max(self.choice.num_homes, FIRST_HOMES))
        wins_ties = least_s or self.choice.has_enough_copies or best_rank >= num_ranked
        prompt_tokens = self._request.size.prompt_tokens
        for index, queue_s in enumerate(self._queues_s):
            if queue_s <= limit_s and index not in likely and index not in self._cold:
                load = self._loads[index]
                cost_s = (load.unread_tokens + prompt_tokens) * load.s_per_token
                if cost_s < limit_s or (wins_ties and cost_s == limit_s):
                    scored.append(self.score(index))
        return scored

    def _likely(self) -> set[int]:
        """Indices of readers with the revision or the prompt's prefix, and of candidates for a further copy."""
        choice, stored_id = self.choice, self._request.stored_id
        likely = set(self._copies)
        if not choice.has_enough_copies:  # it will be loaded, or there is nothing to load
            likely.update(self._order[: max(choice.num_homes, FIRST_HOMES)])
            likely.add(self._queues_s.index(min(self._queues_s)))
            if stored_id is not None:
                likely.update([i for i, disk in enumerate(self._disks) if stored_id in disk])
        if names := self._policy.prefixes.workers(self._request):
            likely.update(i for i, worker in enumerate(self.workers) if worker.name in names)
        return likely


def can_read(worker: WorkerView, request: PlacementRequest) -> bool:
    """Whether a worker that reads prompts can read this one."""
    return (request.positions != "all" or worker.role == "unified") and request.can_be_read_by(worker)


def choose_decode(
    request: PlacementRequest,
    prefill: WorkerView,
    fleet: FleetState,
    may_serve: Callable[[WorkerView], bool] | None = None,
) -> WorkerView | None:
    """The decode worker for a prompt that `prefill` reads; None if no warm one satisfies `may_serve`."""
    decodes: Sequence[WorkerView] = fleet.warm_decodes(prefill)
    if may_serve is not None:
        decodes = [decode for decode in decodes if may_serve(decode)]
    if len(decodes) <= 1:
        return decodes[0] if decodes else None

    def cost(decode: WorkerView) -> tuple[bool, bool, float, int]:
        """Room for the sequence first, then the domain, then the share of KV memory that would be in use."""
        load = fleet.loads[decode.name]
        used = load.used_kv_tokens + request.size.kv_tokens
        fits = not load.max_kv_tokens or used <= load.max_kv_tokens
        is_far = bool(prefill.domain and decode.domain and prefill.domain != decode.domain)
        share = used / load.max_kv_tokens if load.max_kv_tokens else 0.0
        return not fits, is_far, share, load.num_sequences

    if len(decodes) > _FEW_DECODES:
        near = decodes
        if prefill.domain:
            near = fleet.warm_decodes_in_domain(prefill)
            if may_serve is not None:
                near = [decode for decode in near if may_serve(decode)]
        costs = [(cost(decode), decode) for decode in _two_of(near or decodes, request.nonce)]
        (is_full, *_), best = min(costs, key=itemgetter(0))
        if not is_full:
            return best
    return min(decodes, key=cost)  # few, or two that are full


def _two_of(workers: Sequence[WorkerView], nonce: int) -> tuple[WorkerView, ...]:
    first, rest = nonce % len(workers), nonce // len(workers)
    if len(workers) == 1:
        return (workers[0],)
    return workers[first], workers[(first + 1 + rest % (len(workers) - 1)) % len(workers)]


def place(
    request: PlacementRequest, fleet: FleetState, policy: Policy, failed: FailedAttempts = _NOBODY
) -> Placement | None:
    """The best placement that can take the request now, None if there is none.

    Picks the worker that reads the prompt by expected time to first token; then, for a prefill worker, the decode
    worker by free KV memory. Placements without a failed worker are preferred.
    """
    nobody: Set[str] = frozenset()
    distrusted = failed.workers
    # PrefillCandidates and decode workers to leave out: first all that have failed, in the last resort none.
    rounds = ((distrusted, distrusted), (distrusted, nobody), (nobody, distrusted)) if distrusted else ()
    for no_readers, no_decodes in (*rounds, (nobody, nobody)):
        candidates = PrefillCandidates(request, fleet, policy, no_readers)
        for index in candidates.best_first():
            reader = candidates.workers[index]
            if (placement := _completed(reader, request, fleet, failed, no_decodes)) is not None:
                return placement
    return None


def placements(request: PlacementRequest, fleet: FleetState) -> Iterator[Placement]:
    """Every placement that can take the request now, by name."""
    for reader in fleet.readers:
        if not can_read(reader, request):
            continue
        if reader.role in request.single_roles:
            yield Placement(reader, reader)
        elif request.positions != "all" and request.needs_decode:
            yield from (Placement(reader, decode) for decode in fleet.warm_decodes(reader))


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
