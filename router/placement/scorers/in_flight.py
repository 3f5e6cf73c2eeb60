"""Sequences in flight: off by default, for comparison with routers that place by it."""

from __future__ import annotations

from router.placement.scorers.scorer import Candidate, Choice


class InFlightScorer:
    """One second for each of this router's sequences in flight at the worker, however far they are."""

    name = "in_flight"

    def cost_s(self, candidate: Candidate, choice: Choice) -> float:
        return float(candidate.load.num_sequences)

    def least_s(self, choice: Choice) -> float:
        return 0.0
