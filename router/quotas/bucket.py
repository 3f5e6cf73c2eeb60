"""Limits of rates and of concurrent use.

A rate is a token bucket, which grows by `rate` each second up to `capacity`, so requests come in bursts after a pause.
A request is admitted while at least one token is left, whatever it takes, so the bucket may owe: then none is admitted
until the rate has paid. Large requests wait no longer than small ones, and over any time t admitted requests take at
most capacity + rate x t, and the excess of the last one.
"""

from __future__ import annotations

import math

_LEAST = 1 - 1e-9  # that is left for a request to be admitted; less than 1 by what rounding takes away


class Bucket:
    """One limit of one subject, and the equal part of it that this router has. Times are seconds of any one clock."""

    __slots__ = ("all_capacity", "all_rate", "at", "capacity", "level", "rate")

    def __init__(self, rate: float, capacity: float, now: float) -> None:
        self.all_rate, self.all_capacity = rate, capacity  # of all routers together
        self.level = math.inf
        self.at = now
        self.divide(1)

    def divide(self, num_routers: int) -> None:
        """Take the part of one of so many routers."""
        self.rate = self.all_rate / num_routers
        self.capacity = max(1.0, self.all_capacity / num_routers)  # else nothing would ever be admitted
        self.level = min(self.capacity, self.level)

    def refill(self, now: float) -> None:
        """Add what has accumulated since the last refill."""
        if now > self.at:
            self.level = min(self.capacity, self.level + (now - self.at) * self.rate)
            self.at = now

    @property
    def wait_s(self) -> float:
        """Seconds until a request is admitted, unless others come first; 0: now. Call `refill` before."""
        return 0.0 if self.level >= _LEAST else (1 - self.level) / self.rate

    def take(self, amount: float) -> None:
        """Take, or give back a negative amount. The level may become negative: a debt."""
        self.level = min(self.capacity, self.level - amount)

    @property
    def remaining(self) -> float:
        """The amount that is left now."""
        return max(0.0, self.level)

    @property
    def reset_s(self) -> float:
        """Seconds until the bucket is full."""
        return (self.capacity - self.level) / self.rate

    @property
    def is_idle(self) -> bool:
        """Whether it is full, so that it can be forgotten."""
        return self.level >= self.capacity


class Gauge:
    """A limit of concurrent use."""

    __slots__ = ("allowed", "limit", "used")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.allowed = limit  # at this router
        self.used = 0.0

    def divide(self, num_routers: int) -> None:
        """Take the part of one of so many routers."""
        self.allowed = self.limit / num_routers

    def can_take(self, amount: float) -> bool:
        """Whether a request may take so much. One that is larger than this router's part may if there is no other."""
        return amount <= self.limit and (self.used + amount <= self.allowed or not self.used)

    def take(self, amount: float) -> None:
        """Change the use; negative: give back."""
        self.used += amount
