"""How long requests wait for a worker that reads one prompt after the other. Textbook formulas."""

from __future__ import annotations

import math

MAX_BUSY = 0.95  # of a worker's time; beyond it waits grow without bound at the least disturbance


def wait_s(arrivals_per_s: float, service_s: float, cv: float, share: float) -> float:
    """The wait that this share of the requests does not exceed; infinite for a worker that cannot keep up.

    Mean by Pollaczek and Khinchine for M/G/1, W = ρ s (1 + cv²) / 2 (1 - ρ); those who wait at all, a share ρ, wait
    exponentially distributed times (exact for M/M/1).
    """
    busy = arrivals_per_s * service_s
    if busy >= 1:
        return math.inf
    if busy <= 1 - share:
        return 0.0
    mean = busy * service_s * (1 + cv**2) / (2 * (1 - busy))
    return mean / busy * math.log(busy / (1 - share))


def busiest(mean_in_flight: float) -> float:
    """Requests in flight that a worker with this mean seldom exceeds: Poisson, two standard deviations above."""
    return mean_in_flight + 2 * math.sqrt(mean_in_flight)
