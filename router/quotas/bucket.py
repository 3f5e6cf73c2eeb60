"""A token bucket: a rate over time, with room for bursts after a pause.

    level <= capacity           grows by `rate` each second
    a request of cost c         is admitted at level >= min(c, capacity), and takes c

So a request larger than the bucket is admitted when the bucket is full, and leaves a debt. Over any time t, admitted
requests take at most capacity + rate x t, and the excess of the last one.

A steady stream of small requests would starve a large one. So once a request is refused, half of the refill is reserved
for requests of its size (`due`), until one is admitted or its client does not retry in time.

While one limit reserves for such a request, the other limits hold the amount that they would permit it, because small
requests would otherwise use it up. The rest of the refill is for others; for them, the level may exceed the capacity by
a little.
"""

from __future__ import annotations

import math

_ROUNDING = 1e-9
_KEPT_S = 5.0  # that a refused request is wanted: its client tries again, maybe at another router first
_SAVED = 0.5  # of what is added, for the largest request that was refused
_SPARE = 0.05  # of the capacity, beside what is held
_SAVING_S = 120.0  # the most that a gauge saves at a time: what is missing may be in use for hours


class Bucket:
    """One limit of one subject, at one router. Times are seconds of any one clock.

    If routers share the limit, `level` is what this router has leased from the common pool; it grows by leases only.
    `elsewhere` estimates what is left in the pool: the amount when this router last looked, plus the rate since then.
    """

    __slots__ = (
        "advance", "asked_at", "at", "capacity", "due", "due_until", "elsewhere", "level", "local_rate", "part", "rate",
        "saved", "wanted",
    )  # fmt: skip

    def __init__(self, rate: float, capacity: float, now: float) -> None:
        self.rate = rate
        self.capacity = capacity
        self.local_rate = rate  # 0 while the level grows by leases
        self.level = capacity
        self.elsewhere = 0.0
        self.part = 1.0  # of `elsewhere` that this router may use before its next lease
        self.at = self.asked_at = now  # `asked_at`: for the last lease
        self.wanted = 0.0  # all that was asked for, also in vain, since the last lease
        self.advance = 0.0  # part of the level that the pool does not know of yet
        self.due = 0.0  # the largest request that was refused, at most the capacity; 0: none
        self.due_until = 0.0
        self.saved = 0.0  # of the level, for requests as large as `due`

    def refill(self, now: float) -> None:
        """Add what has accumulated since the last refill."""
        if now > self.at:
            grown = (now - self.at) * self.local_rate
            self.level = min(self._room, self.level + grown)
            if self.due or self.saved:
                self.save(grown)
                if now >= self.due_until:
                    self.due = self.saved = 0.0
            if not self.local_rate:
                self.elsewhere = min(self.capacity, self.elsewhere + (now - self.at) * self.rate)
            self.at = now

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` can be taken; 0: now. Call `refill` before.

        For a request that was refused before, this is an upper bound: others may take everything that is not reserved.
        """
        level = self.level - self.saved if amount < self.due else self.level
        if level + self.elsewhere * self.part >= amount:
            return 0.0
        missing = min(amount, self.capacity) - level - self.elsewhere
        if missing <= _ROUNDING and level >= 0:
            return 0.0
        is_shared = self.saved < self.due and (amount < self.due or self.level < 2 * self.saved)
        return max(missing, _ROUNDING) / (self.rate * (1 - _SAVED) if is_shared else self.rate)

    def reserve(self, amount: float, wait_s: float) -> None:
        """Begin to reserve for a request that was refused and told to retry after `wait_s`. Call `refill` before."""
        amount = min(amount, self.capacity)
        if amount >= self.due:
            if not self.due:
                self.saved = max(0.0, self.level) * _SAVED
            self.due, self.due_until = amount, self.at + wait_s + _KEPT_S

    def hold(self, amount: float, wait_s: float) -> None:
        """Reserve `amount` for a request that this limit permits, while another limit refuses it for `wait_s`."""
        amount = min(amount, self.capacity)
        if amount >= self.due:
            self.saved = max(self.saved, min(amount, self.level))
            self.due, self.due_until = amount, max(self.due_until, self.at + wait_s + _KEPT_S)

    def is_for(self, amount: float) -> bool:
        """Whether the reservation is for a request of this size, not for a larger one."""
        return self.due == min(amount, self.capacity)

    def save(self, added: float) -> None:
        """Note that the level has grown, and reserve the large request's share of the growth."""
        self.saved = min(self.due, self.saved + added * _SAVED)

    def serve(self, amount: float) -> None:
        """Admit a request that `wait_s` permits."""
        self.take(amount)
        if amount >= self.due:
            self.due = self.saved = 0.0

    def take(self, amount: float) -> None:
        """Take, or give back a negative amount. The level may become negative: a debt."""
        self.level = min(self._room, self.level - amount)

    @property
    def _room(self) -> float:
        """The highest level. It leaves others some room beside a reservation of nearly everything."""
        return max(self.capacity, self.saved + _SPARE * self.capacity) if self.saved else self.capacity

    @property
    def remaining(self) -> float:
        """The amount that could be taken now, at this router or another."""
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
    """A limit of concurrent use. Half of what becomes free is reserved for the largest refused request."""

    __slots__ = (
        "allowed", "due", "due_since", "due_until", "kept", "kept_until", "limit", "peak", "refused", "rests_until",
        "saved", "unit", "used",
    )  # fmt: skip

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.allowed = limit  # less than the limit where other routers have leased the rest
        self.used = 0.0
        self.peak = 0.0  # the most that was wanted since the last lease
        self.refused = 0.0  # the smallest request that was refused since then
        self.kept = 0.0  # what is still wanted of what was refused before
        self.kept_until = 0.0
        self.unit = 0.0  # the smallest request of that
        self.due = 0.0  # the largest request that was refused; 0: none
        self.due_since = self.due_until = 0.0
        self.rests_until = 0.0  # nothing is saved before
        self.saved = 0.0  # of what is free, for requests as large as `due`

    def refill(self, now: float) -> None:
        """End a reservation that has expired."""
        if self.due and now >= self.due_until:  # in vain: the others' turn, for as long
            self.rests_until = 2 * self.due_until - self.due_since
            self.due = self.saved = 0.0

    def can_take(self, amount: float, has: float = 0.0) -> bool:
        """Whether a request that holds `has` may take `amount` more.

        False for a request that is larger than the whole limit.
        """
        unit = has + amount
        if unit > self.limit:
            return False
        self.peak = max(self.peak, self.used + amount)
        if self.used + amount <= self.allowed - (math.floor(self.saved) if unit < self.due else 0):
            return True
        self.refused = min(self.refused or unit, unit)
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

    def reserve(self, unit: float, now: float) -> None:
        """Begin to reserve for a refused request of this size. Call `refill` before."""
        if self.due <= unit <= self.limit and now >= self.rests_until:
            if not self.due:
                self.due_since, self.saved = now, max(0.0, self.allowed - self.used) * _SAVED
            self.due, self.due_until = unit, min(now + _KEPT_S, self.due_since + _SAVING_S)

    def hold(self, unit: float, wait_s: float, now: float) -> None:
        """Reserve `unit` for a request that this limit permits and another one refuses for `wait_s`."""
        if self.due <= unit and now >= self.rests_until:
            if not self.due:
                self.due_since = now
            self.saved = max(self.saved, unit)
            until = max(self.due_until, now + wait_s + _KEPT_S)
            self.due, self.due_until = unit, min(until, self.due_since + _SAVING_S)

    def take(self, amount: float) -> None:
        """Change the use; negative: give back."""
        self.used += amount
        if amount < 0:
            self.saved = min(self.due, self.saved - amount * _SAVED)

    def serve(self, unit: float) -> None:
        """Admit a request that `can_take` permits."""
        self.take(unit)
        if unit >= self.due:
            self.due = self.saved = 0.0
