"""The placement policy: what it costs to read a prompt at a worker, in expected seconds to the first token."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from cluster.config.router import SloConfig
from router.fleet.fleet_state import WorkerView
from router.fleet.worker_loads import WorkerLoad
from router.placement.prefix_index import PrefixIndex
from router.placement.request import PlacementRequest

LOAD_BOUND = 1.25  # a home is full at this multiple of the workers' mean queue
SLACK_PROMPTS = 2.0  # plus this many prompts
MAX_ADAPTER_HOMES = 8
HOME_SHARE = 0.25  # of a worker's time, per home of an adapter
FIRST_HOMES = 3  # that an adapter may be loaded on first, whichever is the least busy
_FIRST_COPY = 4.0  # in prompts: a first load away from them
_STRAY_COPY = 1.0  # in prompts: lets copies away from homes age out
_NEW_COPY = 6.0  # in loads: one copy more than demand asks for evicts another adapter
_PACE = 2.0  # in prompts, per sequence that waits meanwhile
_TAIL = 1.5  # of waits for prompts: some sequences wait for more of them than the mean
_FULL_S = 1.0  # per KV memory's worth of tokens that do not fit

_INITIAL_ANSWER_TOKENS = 128.0
_INITIAL_LOAD_S = {"disk": 0.05, "store": 0.5}  # by where a load begins


@dataclass(slots=True)
class Candidate:
    """A worker that could read the prompt."""

    worker: WorkerView
    load: WorkerLoad
    rank: int  # in the revision's rendezvous order; `len(order)` and more: not in it
    has_revision: bool  # in host memory, or one of the first homes and a sequence in flight there makes sure of it


@dataclass(slots=True)
class Choice:
    """Inputs that all candidates of one choice share."""

    request: PlacementRequest
    read_s: float  # expected seconds to read this prompt
    full_queue_s: float  # a longer queue makes a home full
    num_homes: int  # candidates of a lower rank are homes of the revision
    num_wanted: int = 1  # copies that demand asks for
    num_copies: int = 0  # candidates that have the revision
    spared_s: float = 0.0  # of the cost of each unified worker's pace

    @property
    def has_enough_copies(self) -> bool:
        return self.num_copies >= self.num_wanted


class Policy:
    """One router's policy. The cost of a candidate is the sum of the scorers, the methods that take one.

    They read their arguments and the observations in `load_s` and `prefixes`: no clock, no random number.
    """

    def __init__(self, slo: SloConfig = SloConfig()) -> None:
        self.load_s, self.prefixes = dict(_INITIAL_LOAD_S), PrefixIndex()
        self.answer_tokens = _INITIAL_ANSWER_TOKENS  # mean of answers
        self.slo = slo

    def num_homes(self, request: PlacementRequest) -> int:
        """One, and one more for each `HOME_SHARE` of a worker's time that the revision's prompts demand."""
        if request.revision_id is None:
            return 1
        return min(MAX_ADAPTER_HOMES, 1 + int(request.demand / HOME_SHARE))

    def cost_s(self, candidate: Candidate, choice: Choice) -> float:
        """Expected seconds to the first token."""
        return (
            self.queue_s(candidate, choice)
            + self.residency_s(candidate, choice)
            + self.home_s(candidate, choice)
            + self.prefix_s(candidate, choice)
            + self.generation_s(candidate, choice)
        )

    def least_s(self, choice: Choice) -> float:
        """A lower bound of any ordinary worker's cost without its queue, so that not all of them need to be scored.

        An ordinary worker has neither the revision nor the prompt's prefix. If the revision has to be loaded, an
        ordinary worker does not have it on disk either, and is not one of its homes.
        """
        if choice.request.revision_id is None:
            return 0.0
        store_s, disk_s = self.load_s["store"], self.load_s["disk"]
        if choice.has_enough_copies:  # a copy more than demand asks for is not looked for on disks
            return min(store_s, disk_s) + _NEW_COPY * store_s
        return store_s + _FIRST_COPY * choice.read_s

    def queue_s(self, candidate: Candidate, choice: Choice) -> float:
        """The time to read all prompts at the worker, the batch in progress included, and this one."""
        load = candidate.load
        return (load.unread_tokens + choice.request.size.prompt_tokens) * load.s_per_token

    def residency_s(self, candidate: Candidate, choice: Choice) -> float:
        """0 if the revision is resident or being loaded, else the time of a load from the nearest tier that has it."""
        stored_id = choice.request.stored_id
        if stored_id is None or candidate.has_revision:
            return 0.0
        return self.load_s["disk" if stored_id in candidate.worker.residency.disk else "store"]

    def home_s(self, candidate: Candidate, choice: Choice) -> float:
        """The cost of leaving an adapter's homes, of overloading one of them, and of an extra copy.

        A unified worker that generates for adapters of all positions is no home of the others, or of the base model:
        its batches are slower, and it may be the only one that serves such adapters.
        """
        is_for_others = candidate.load.num_everywhere and choice.request.positions != "all"
        if choice.request.revision_id is None:
            return _FIRST_COPY * choice.read_s if is_for_others else 0.0
        is_home = candidate.rank < max(choice.num_homes, FIRST_HOMES) and not is_for_others
        if not candidate.has_revision:
            if choice.has_enough_copies:
                return _NEW_COPY * self.load_s["store"]
            return 0.0 if is_home else _FIRST_COPY * choice.read_s
        if is_home:
            return max(0.0, candidate.load.wait_s - choice.full_queue_s)
        return _STRAY_COPY * choice.read_s

    def prefix_s(self, candidate: Candidate, choice: Choice) -> float:
        """Minus the time to read the prefix of the prompt that is in the worker's prefix cache."""
        if not choice.request.size.blocks:
            return 0.0
        worker = candidate.worker
        return (
            -self.prefixes.cached_tokens(choice.request, worker.name, worker.incarnation) * candidate.load.s_per_token
        )

    def spared_beside_prefill(self, unified: Sequence[WorkerLoad], read_s: float) -> float:
        """What the pace of each unified worker costs less beside prefill workers; `read_s` is as in `Choice`.

        `_PACE` spreads sequences over unified workers. Beside prefill workers alone it would keep prompts from unified
        ones until those queues are longer than the objective allows. There, the pace of the least busy unified worker
        costs a time to the first token that is to its objective as this: waits for prompts, per token, to what a step
        leaves of the objective for a token.
        """
        least = min(unified, key=attrgetter("all_generating"))
        slack_s = self.slo.event_gap_s - least.reported_steps.step_s
        if slack_s <= 0:
            return 0.0
        strain = _TAIL * self.slo.first_token_s / (self.answer_tokens * slack_s)
        return max(0.0, _PACE - strain) * read_s * least.all_generating

    def generation_s(self, candidate: Candidate, choice: Choice) -> float:
        """What a unified worker's own generation costs: waiting for KV memory, and sequences that wait for this prompt.

        A queue tells nothing of them: without this cost every adapter stays at its first home, however unevenly the
        homes are spread, and the tokens of the busiest worker come too slowly. 0 for prefill workers: their decode
        worker is chosen by KV memory (`choose_decode`).
        """
        load = candidate.load
        if candidate.worker.role != "unified":
            return 0.0
        cost = _PACE * choice.read_s * load.all_generating - choice.spared_s
        if load.max_kv_tokens:
            missing = load.used_kv_tokens + choice.request.size.kv_tokens - load.max_kv_tokens
            cost += max(0, missing) / load.max_kv_tokens * _FULL_S
        return cost
