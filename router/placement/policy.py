"""The placement policy: the scorers with what they learn, and how many homes a revision has."""

from __future__ import annotations

from router.placement.prefix_index import PrefixIndex
from router.placement.request import LoadTimes, PlacementRequest
from router.placement.scorers import (
    Choice,
    GenerationScorer,
    HomeScorer,
    PrefixScorer,
    QueueScorer,
    ResidencyScorer,
    Scorer,
)

LOAD_BOUND = 1.25  # a home is full at this multiple of the workers' mean queue
SLACK_PROMPTS = 2.0  # plus this many prompts
MAX_ADAPTER_HOMES = 8
HOME_SHARE = 0.25  # of a worker's time, per home of an adapter


class Policy:
    """One router's policy. Scorers read the observations in `load_times` and `prefixes`."""

    def __init__(self) -> None:
        self.load_times, self.prefixes = LoadTimes(), PrefixIndex()
        self.scorers: tuple[Scorer, ...] = (
            QueueScorer(),
            ResidencyScorer(self.load_times),
            HomeScorer(self.load_times),
            PrefixScorer(self.prefixes),
            GenerationScorer(),
        )

    def least_s(self, choice: Choice) -> float:
        """A lower bound of an ordinary worker's cost without its queue; see `Scorer.least_s`."""
        return sum(scorer.least_s(choice) for scorer in self.scorers)

    def num_homes(self, request: PlacementRequest) -> int:
        """One, and one more for each `HOME_SHARE` of a worker's time that the revision's prompts demand."""
        if request.revision_id is None:
            return 1
        return min(MAX_ADAPTER_HOMES, 1 + int(request.demand / HOME_SHARE))
