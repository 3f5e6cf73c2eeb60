"""Prefix-cache affinity."""

from __future__ import annotations

from router.placement.prefix_index import PrefixIndex
from router.placement.scorers.scorer import Candidate, Choice


class PrefixScorer:
    """Minus the time to read the prefix of the prompt that is in the worker's prefix cache."""

    name = "prefix"

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def cost_s(self, candidate: Candidate, choice: Choice) -> float:
        if not choice.request.size.blocks:
            return 0.0
        worker = candidate.worker
        return -self._index.cached_tokens(choice.request, worker.name, worker.incarnation) * candidate.load.s_per_token

    def least_s(self, choice: Choice) -> float:
        return 0.0
