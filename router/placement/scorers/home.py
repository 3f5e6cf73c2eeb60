"""Affinity: a revision's requests stay on its homes until these are full."""

from __future__ import annotations

from router.placement.request import LoadTimes
from router.placement.scorers.scorer import Candidate, Choice

FIRST_HOMES = 3  # that an adapter may be loaded on first, whichever is the least busy
_FIRST_COPY = 4.0  # in prompts: a first load away from them
_STRAY_COPY = 1.0  # in prompts: lets copies away from homes age out
_NEW_COPY = 6.0  # in loads: one copy more than demand asks for evicts another adapter


class HomeScorer:
    """The cost of leaving an adapter's homes, of overloading one of them, and of an extra copy.

    A unified worker that generates for adapters of all positions is no home of the others, or of the base model: its
    batches are slower, and it may be the only one that serves such adapters.
    """

    name = "home"

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
