"""The workers that can read one prompt, and their costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from operator import attrgetter

from router.fleet.fleet_state import FleetState, WorkerView
from router.fleet.homes import homes_among
from router.fleet.worker_loads import WorkerLoad
from router.placement.policy import Policy
from router.placement.request import PlacementRequest
from router.placement.scorers.home import FIRST_HOMES
from router.placement.scorers.scorer import Candidate, Choice

_NUM_SPARE_HOMES = 2  # for homes that are full
_FEW = 8  # readers that are all scored; of more, those that can win
_ROUNDING_S = 1e-9  # sums of the same costs in another order
_wait_s = attrgetter("wait_s")

Scored = tuple[float, int, str, int]  # cost in seconds, rank among the homes, name, index; the least is the best


class Readers:
    """The workers that can read one prompt. All sequences and indices have the order of `workers`."""

    def __init__(
        self, request: PlacementRequest, fleet: FleetState, policy: Policy, excluded: Set[str] = frozenset()
    ) -> None:
        self._request, self._policy = request, policy
        self.workers: Sequence[WorkerView] = fleet.readers
        self._loads: Sequence[WorkerLoad] = fleet.reader_loads
        self._disks: Sequence[Set[str]] = fleet.reader_disks
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
            homes = homes_among(tuple(worker.name for worker in self.workers))
        self._homes = homes

    def best_first(self) -> Iterator[int]:
        """The indices of all readers, cheapest first. Scores readers lazily."""
        if len(self.workers) <= 1:  # nothing to compare
            yield from range(len(self.workers))
            return
        self._prepare()
        if len(self.workers) <= _FEW:
            yield from self._ranked()
            return
        first = min(self._contenders())[3]
        yield first
        yield from (index for index in self._ranked() if index != first)

    def ranked(self) -> list[int]:
        """The indices of all readers, cheapest first, all of them scored. `candidate` and `choice` explain why."""
        if not self.workers:
            return []
        self._prepare()
        return self._ranked()

    def score(self, index: int) -> Scored:
        candidate, choice, cost_s = self.candidate(index), self.choice, 0.0
        for weight, scorer in self._policy.scorers:
            cost_s += weight * scorer.cost_s(candidate, choice)
        return cost_s, candidate.rank, candidate.worker.name, index

    def candidate(self, index: int) -> Candidate:
        order = self._order
        rank = order.index(index) if index in order else len(order)
        return Candidate(self.workers[index], self._loads[index], rank, index in self._copies)

    def _prepare(self) -> None:
        """Compute what scoring needs: queue lengths, and the revision's homes and copies."""
        request, policy, loads = self._request, self._policy, self._loads
        self._queues_s = list(map(_wait_s, loads))
        revision_id = request.revision_id
        if revision_id is not None and policy.uses_homes:
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
        full_queue_s = policy.load_bound * mean_queue_s + policy.slack_prompts * read_s
        num_wanted = missing = policy.num_homes(request)
        num_homes = 0
        for index in self._order:  # a full home is replaced by the next one
            num_homes += 1
            missing -= queues_s[index] <= full_queue_s
            if not missing:
                break
        return Choice(request, read_s, full_queue_s, num_homes, num_wanted, len(self._copies))

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
        weight, prompt_tokens = self._policy.queue_weight, self._request.size.prompt_tokens
        for index, queue_s in enumerate(self._queues_s):
            if weight * queue_s <= limit_s and index not in likely and index not in self._cold:
                load = self._loads[index]
                cost_s = weight * ((load.unread_tokens + prompt_tokens) * load.s_per_token)
                if cost_s < limit_s or (wins_ties and cost_s == limit_s):
                    scored.append(self.score(index))
        return scored

    def _likely(self) -> set[int]:
        """Indices of readers with the revision or the prompt's prefix, and of candidates for a further copy."""
        choice, revision_id = self.choice, self._request.revision_id
        likely = set(self._copies)
        if not choice.has_enough_copies:  # it will be loaded, or there is nothing to load
            likely.update(self._order[: max(choice.num_homes, FIRST_HOMES)])
            likely.add(self._queues_s.index(min(self._queues_s)))
            if revision_id is not None:
                likely.update([i for i, disk in enumerate(self._disks) if revision_id in disk])
        if names := self._policy.prefixes.workers(self._request):
            likely.update(i for i, worker in enumerate(self.workers) if worker.name in names)
        return likely


def can_read(worker: WorkerView, request: PlacementRequest) -> bool:
    """Whether a worker that reads prompts can read this one."""
    return (request.positions != "all" or worker.role == "unified") and request.can_be_read_by(worker)
