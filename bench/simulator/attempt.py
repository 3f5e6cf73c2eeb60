"""A simulated request, and one attempt to serve it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from router.placement.placer import Reservation
from router.placement.request import FailedAttempts, PlacementRequest

_NO_FAILURE = FailedAttempts()
W = TypeVar("W")  # what runs it: a worker


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """What a client sent, and what came of it. Times are simulated seconds."""

    number: int
    at_s: float
    placement_request: PlacementRequest
    prompt_tokens: int
    output_tokens: int
    failed: FailedAttempts = _NO_FAILURE
    num_attempts: int = 0
    was_cold: bool = False  # it waited for its adapter
    first_s: float = math.nan  # when the client has the first token
    end_s: float = math.nan

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
    is_over: bool = False  # ended or given up: engines skip it
    has_capacity: bool = False  # KV memory of the generator is kept for it
    awaits_room: bool = False
    is_unread: bool = False  # it has room, and its prompt is queued or read
    generates: bool = False

    @property
    def revision_id(self) -> str | None:
        return self.request.placement_request.revision_id

    @property
    def is_pair(self) -> bool:
        return self.reader is not self.generator
