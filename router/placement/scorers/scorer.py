"""The interface of scorers, and their inputs."""

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

    name: str

    def cost_s(self, candidate: Candidate, choice: Choice) -> float:
        """This scorer's contribution to the expected seconds to the first token. May be negative."""
        ...

    def least_s(self, choice: Choice) -> float:
        """A lower bound of the cost of any ordinary worker, so that not all of them need to be scored.

        An ordinary worker has neither the revision nor the prompt's prefix. If the revision has to be loaded, an
        ordinary worker does not have it on disk either, and is not one of its homes.
        """
        ...
