"""A simulated request, and who serves it."""

import math
from dataclasses import dataclass
from typing import Any

from router.placement.placer import Reservation


@dataclass(slots=True, eq=False)
class Attempt:
    """A request at its workers: one, or a pair. Times are simulated seconds."""

    number: int
    at_s: float
    revision_id: str | None
    prompt_tokens: int
    output_tokens: int
    placed: Reservation
    reader: Any  # workers of the run
    generator: Any
    left_tokens: int  # of the prompt, not read yet
    was_cold: bool = False  # it waited for its adapter
    first_s: float = math.nan  # when the client has the first token

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens
