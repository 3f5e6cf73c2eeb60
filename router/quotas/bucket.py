"""Limits of rates and of concurrent use.

A rate is a token bucket, which grows by `rate` each second up to `capacity`, so requests come in bursts after a pause.
A request is admitted while at least one token is left, whatever it takes, so the bucket may owe: then none is admitted
until the rate has paid. Large requests wait no longer than small ones, and over any time t admitted requests take at
most capacity + rate x t, and the excess of the last one.
"""

LEASE_S = 0.2  # between two leases of a shared limit
_LEAST = 1 - 1e-9  # that is left for a request to be admitted; less than 1 by what rounding takes away
_KEPT_S = 5.0  # that a refused request is wanted: its client tries again, maybe at another router first


class Bucket:
    """One limit of one subject, at one router. Times are seconds of any one clock.

    If routers share the limit, `level` is what this router has leased from the common pool; it grows by leases only.
    `elsewhere` estimates what is left in the pool: the amount when this router last looked, plus the rate since then.
    """

    __slots__ = ("advance", "at", "capacity", "elsewhere", "level", "local_rate", "part", "rate", "wanted")

    def __init__(self, rate: float, capacity: float, now: float) -> None:
        self.rate = rate
        self.capacity = capacity
        self.local_rate = rate  # 0 while the level grows by leases
        self.level = capacity
        self.elsewhere = 0.0
        self.part = 1.0  # of `elsewhere` that this router may use before its next lease
        self.at = now
        self.wanted = 0.0  # all that was asked for, also in vain, since the last lease
        self.advance = 0.0  # part of the level that the pool does not know of yet

    def refill(self, now: float) -> None:
        """Add what has accumulated since the last refill."""
        if now > self.at:
            self.level = min(self.capacity, self.level + (now - self.at) * self.local_rate)
            if not self.local_rate:
                self.elsewhere = min(self.capacity, self.elsewhere + (now - self.at) * self.rate)
            self.at = now

    @property
    def wait_s(self) -> float:
        """Seconds until a request is admitted, unless others come first; 0: now. Call `refill` before."""
        if self.level + self.elsewhere * self.part >= _LEAST:
            return 0.0
        missing = 1 - self.level - self.elsewhere
        if missing <= 1 - _LEAST and self.level >= 0:
            return 0.0
        return max(missing / self.rate, 1e-9 if self.local_rate else LEASE_S)

    def take(self, amount: float) -> None:
        """Take, or give back a negative amount. The level may become negative: a debt."""
        self.level = min(self.capacity, self.level - amount)

    @property
    def remaining(self) -> float:
        """The amount that is left now, at this router or another."""
        return max(0.0, min(self.capacity, self.level + self.elsewhere))

    @property
    def reset_s(self) -> float:
        """Seconds until the bucket is full."""
        return max(0.0, self.capacity - self.level - self.elsewhere) / self.rate

    @property
    def is_idle(self) -> bool:
        """Whether it is full, so that it can be forgotten."""
        return self.level >= self.capacity


class Gauge:
    """A limit of concurrent use."""

    __slots__ = ("allowed", "kept", "kept_until", "limit", "peak", "refused", "unit", "used")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.allowed = limit  # less than the limit where other routers have leased the rest
        self.used = 0.0
        self.peak = 0.0  # the most that was wanted since the last lease
        self.refused = 0.0  # the smallest request that was refused since then
        self.kept = 0.0  # what is still wanted of what was refused before
        self.kept_until = 0.0
        self.unit = 0.0  # the smallest request of that

    def can_take(self, amount: float) -> bool:
        """Whether a request may take so much."""
        if amount > self.limit:
            return False
        self.peak = max(self.peak, self.used + amount)
        if self.used + amount <= self.allowed:
            return True
        self.refused = min(self.refused or amount, amount)
        return False

    def wanted(self, now: float) -> float:
        """The use as if nothing had been refused since the last call: the amount that a lease should ask for."""
        if now >= self.kept_until:
            self.kept = self.unit = 0.0
        if self.refused and self.peak >= self.kept:
            self.kept, self.kept_until = self.peak, now + _KEPT_S
            self.unit = min(self.unit or self.refused, self.refused)
        wanted = max(self.peak, self.used, self.kept)
        self.peak, self.refused = self.used, 0.0
        return min(wanted, self.limit)

    def take(self, amount: float) -> None:
        """Change the use; negative: give back."""
        self.used += amount
