"""The placement policy: scorers with their weights, and how many homes a revision has."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from router.placement.prefix_index import PrefixIndex
from router.placement.request import LoadTimes, PlacementRequest
from router.placement.scorers import (
    Choice,
    FreeKvScorer,
    HomeScorer,
    PrefixScorer,
    QueueScorer,
    ResidencyScorer,
    Scorer,
)


@dataclass(frozen=True, slots=True)
class ScorerWeights:
    """Weights of the scorers, whose costs are expected seconds to the first token. 0 switches a scorer off.

    All are 1, since all costs are seconds; tests and simulations compare others.
    """

    queue: float = 1.0  # prompts to be read before this one
    residency: float = 1.0  # a cold load
    home: float = 1.0  # leaving the adapter's homes, overloading one, an extra copy
    prefix: float = 1.0  # the part of the prompt in the prefix cache
    free_kv: float = 1.0  # KV memory that a unified worker lacks


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """How the router chooses workers."""

    weights: ScorerWeights = ScorerWeights()
    load_bound: float = 1.25  # a home is full at this multiple of the workers' mean queue
    slack_prompts: float = 2.0  # plus this many prompts
    max_homes: int = 8  # of one adapter
    home_share: float = 0.25  # of a worker's time, per home of an adapter


@dataclass(frozen=True)
class Policy:
    """The parameters of placement. Scorers read the observations in `load_times` and `prefixes`."""

    scorers: tuple[tuple[float, Scorer], ...]  # weight, scorer
    load_times: LoadTimes
    prefixes: PrefixIndex
    load_bound: float
    slack_prompts: float
    max_homes: int
    home_share: float
    uses_homes: bool
    queue_weight: float

    @classmethod
    def of(cls, config: PlacementConfig) -> Policy:
        load_times, prefixes = LoadTimes(), PrefixIndex()
        scorers: list[Scorer] = [
            QueueScorer(),
            ResidencyScorer(load_times),
            HomeScorer(load_times),
            PrefixScorer(prefixes),
            FreeKvScorer(),
        ]
        weights = asdict(config.weights)
        return cls(
            tuple((weights[scorer.name], scorer) for scorer in scorers if weights[scorer.name]),
            load_times,
            prefixes,
            config.load_bound,
            config.slack_prompts,
            config.max_homes,
            config.home_share,
            uses_homes=weights["home"] > 0,
            queue_weight=weights["queue"],
        )

    def least_s(self, choice: Choice) -> float:
        """A lower bound of an ordinary worker's cost without its queue; see `Scorer.least_s`."""
        least_s = 0.0
        for weight, scorer in self.scorers:
            least_s += weight * scorer.least_s(choice)
        return least_s

    def num_homes(self, request: PlacementRequest) -> int:
        """One, and one more for each `home_share` of a worker's time that the revision's prompts demand."""
        if request.revision_id is None:
            return 1
        return min(self.max_homes, 1 + int(request.demand / self.home_share))
