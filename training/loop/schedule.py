"""The learning rate of a step: a linear warm-up, then a decay. A pure function, so there is nothing to resume."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Decay = Literal["linear", "cosine", "constant"]
DECAYS: tuple[Decay, ...] = get_args(Decay)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rises for `num_warmup` steps, reaches `peak` in the last of them, then falls towards 0 at `num_steps`."""

    peak: float
    num_steps: int
    num_warmup: int = 0  # below num_steps
    decay: Decay = "linear"

    def at(self, step: int) -> float:
        """The learning rate of this step, counted from 0. It is never 0 before `num_steps`."""
        if step < self.num_warmup:
            return self.peak * (step + 1) / self.num_warmup
        if self.decay == "constant":
            return self.peak
        done = min((step - self.num_warmup) / (self.num_steps - self.num_warmup), 1.0)
        return self.peak * (1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2)
