"""What scorers get, and what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from router.fleet.fleet_state import WorkerView
from router.fleet.worker_loads import WorkerLoad
from router.placement.request import PlacementRequest


@dataclass(slots=True)
class Candidate:
    """A worker that could read the prompt."""

    worker: WorkerView
    load: WorkerLoad
    rank: int  # in the revision's rendezvous order; `len(order)` and more: not in it
    has_revision: bool  # in host memory, or one of the first homes and a sequence in flight there makes sure of it


@dataclass(slots=True)
class Choice:
    """What the candidates of one choice have in common."""

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
    """Adds to a candidate's cost. Reads only what it gets and its own observations: no clock, no random number."""

    name: str

    def cost_s(self, candidate: Candidate, choice: Choice) -> float:
        """Expected seconds until the first token, as far as this scorer is concerned. May be negative."""
        ...

    def least_s(self, choice: Choice) -> float:
        """No more than what any ordinary worker costs. Spares scoring them all.

        An ordinary worker has neither the revision nor the prompt's beginning. Where the revision has to be loaded,
        it does not have it on disk either, and is none of the homes.
        """
        ...
