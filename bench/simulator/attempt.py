"""A simulated request, and who serves it."""

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from router.placement.placer import Reservation
from router.placement.request import PlacementRequest

W = TypeVar("W")  # what runs it: a worker


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """What a client sent, and what came of it. Times are simulated seconds."""

    number: int
    at_s: float
    placement_request: PlacementRequest
    prompt_tokens: int
    output_tokens: int
    was_cold: bool = False  # it waited for its adapter
    first_s: float = math.nan  # when the client has the first token

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(slots=True, eq=False)
class Attempt(Generic[W]):
    """A request at its workers: one, or a pair."""

    request: SimulatedRequest
    placed: Reservation
    reader: W
    generator: W
    left_tokens: int  # of the prompt, not read yet
    placed_s: float = 0.0

    @property
    def revision_id(self) -> str | None:
        return self.request.placement_request.revision_id
