"""Scorers: each is one part of the cost of reading a prompt at a worker, in expected seconds to the first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from router.fleet.fleet_state import WorkerView
from router.fleet.worker_loads import WorkerLoad
from router.placement.prefix_index import PrefixIndex
from router.placement.request import LoadTimes, PlacementRequest

FIRST_HOMES = 3  # that an adapter may be loaded on first, whichever is the least busy
_FIRST_COPY = 4.0  # in prompts: a first load away from them
_STRAY_COPY = 1.0  # in prompts: lets copies away from homes age out
_NEW_COPY = 6.0  # in loads: one copy more than demand asks for evicts another adapter
_PACE = 2.0  # in prompts, per sequence that waits meanwhile
_FULL_S = 1.0  # per KV memory's worth of tokens that do not fit


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

    @property
    def has_enough_copies(self) -> bool:
        return self.num_copies >= self.num_wanted


class Scorer(Protocol):
    """One part of a candidate's cost. Reads only its arguments and own observations: no clock, no random number."""

    def cost_s(self, candidate: Candidate, choice: Choice) -> float:
        """This scorer's contribution to the expected seconds to the first token. May be negative."""
        ...

    def least_s(self, choice: Choice) -> float:
        """A lower bound of the cost of any ordinary worker, so that not all of them need to be scored.

        An ordinary worker has neither the revision nor the prompt's prefix. If the revision has to be loaded, an
        ordinary worker does not have it on disk either, and is not one of its homes.
        """
        return 0.0


class QueueScorer(Scorer):
    """The time to read all prompts at the worker, the batch in progress included, and this one."""

    def cost_s(self, candidate: Candidate, choice: Choice) -> float:
        load = candidate.load
        return (load.unread_tokens + choice.request.size.prompt_tokens) * load.s_per_token


class ResidencyScorer(Scorer):
    """0 if the revision is resident or being loaded, else the time of a load from the nearest tier that has it."""

    def __init__(self, load_times: LoadTimes) -> None:
        self._load_times = load_times

    def cost_s(self, candidate: Candidate, choice: Choice) -> float:
        revision_id = choice.request.revision_id
        if revision_id is None or candidate.has_revision:
            return 0.0
        return self._load_times["disk" if revision_id in candidate.worker.residency.disk else "store"]

    def least_s(self, choice: Choice) -> float:
        if choice.request.revision_id is None:
            return 0.0
        store_s, disk_s = self._load_times["store"], self._load_times["disk"]
        # A copy more than demand asks for is not looked for on disks.
        return min(store_s, disk_s) if choice.has_enough_copies else store_s


class HomeScorer(Scorer):
    """The cost of leaving an adapter's homes, of overloading one of them, and of an extra copy.

    A unified worker that generates for adapters of all positions is no home of the others, or of the base model: its
    batches are slower, and it may be the only one that serves such adapters.
    """

    def __init__(self, load_times: LoadTimes) -> None:
        self._load_times = load_times

    def cost_s(self, candidate: Candidate, choice: Choice) -> float:
        is_for_others = candidate.load.num_everywhere and choice.request.positions != "all"
        if choice.request.revision_id is None:
            return _FIRST_COPY * choice.read_s if is_for_others else 0.0
        is_home = candidate.rank < max(choice.num_homes, FIRST_HOMES) and not is_for_others
        if not candidate.has_revision:
            if choice.has_enough_copies:
                return _NEW_COPY * self._load_times["store"]
            return 0.0 if is_home else _FIRST_COPY * choice.read_s
        if is_home:
            return max(0.0, candidate.load.wait_s - choice.full_queue_s)
        return _STRAY_COPY * choice.read_s

    def least_s(self, choice: Choice) -> float:
        if choice.request.revision_id is None:
            return 0.0
        return _NEW_COPY * self._load_times["store"] if choice.has_enough_copies else _FIRST_COPY * choice.read_s


class PrefixScorer(Scorer):
    """Minus the time to read the prefix of the prompt that is in the worker's prefix cache."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def cost_s(self, candidate: Candidate, choice: Choice) -> float:
        if not choice.request.size.blocks:
            return 0.0
        worker = candidate.worker
        return -self._index.cached_tokens(choice.request, worker.name, worker.incarnation) * candidate.load.s_per_token


class GenerationScorer(Scorer):
    """What a unified worker's own generation costs: waiting for KV memory, and the sequences that wait for this prompt.

    A queue tells nothing of them: without this cost every adapter stays at its first home, however unevenly the homes
    are spread, and the tokens of the busiest worker come too slowly. 0 for prefill workers: their decode worker is
    chosen by KV memory (`choose_decode`).
    """

    def cost_s(self, candidate: Candidate, choice: Choice) -> float:
        load = candidate.load
        if candidate.worker.role != "unified":
            return 0.0
        cost = _PACE * choice.read_s * load.num_generating * load.num_routers
        if load.max_kv_tokens:
            missing = load.used_kv_tokens + choice.request.size.kv_tokens - load.max_kv_tokens
            cost += max(0, missing) / load.max_kv_tokens * _FULL_S
        return cost
