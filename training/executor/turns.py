"""Whose turn it is: tenants share what is computed by its tokens, whoever has how many commands.

A tenant's next command starts, in virtual time, where its last one ended, by tokens and weight. The earliest start is
served. So a tenant that begins late waits for one command, and saves nothing up.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

_MINUTE_S = 60.0


class Share(NamedTuple):
    """A tenant's."""

    weight: float = 1.0  # relative to other tenants
    tokens_per_min: float | None = None  # None: no limit


class Turns:
    """Tenants of one executor. Not thread-safe."""

    def __init__(self, share_of: Callable[[str], Share], clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._share_of = share_of
        self._now = 0.0  # virtual: the start of the command that was chosen last
        self._ends: dict[str, float] = {}  # of tenants' last commands
        # Tokens that a tenant may use, and since when; less than 0: debt.
        self._levels: dict[str, tuple[float, float]] = {}

    def first(self, tenants: Iterable[str]) -> str | None:
        """The tenant that is next, of those with a command; None: all are over their limits."""
        may = [each for each in tenants if not self.wait_s(each)]
        return min(may, key=self._start_of, default=None)

    def wait_s(self, tenant: str) -> float:
        """Until the tenant is within its limit. It may be over it by one command, however large."""
        if (limit := self._share_of(tenant).tokens_per_min) is None:
            return 0.0
        return max(0.0, 1 - self._level(tenant, limit)) * _MINUTE_S / limit

    def take(self, tenant: str, num_tokens: int) -> None:
        """Count a command of the tenant, which is being computed."""
        share, self._now = self._share_of(tenant), self._start_of(tenant)
        self._ends[tenant] = self._now + max(num_tokens, 1) / share.weight
        if share.tokens_per_min is not None:
            left = self._level(tenant, share.tokens_per_min) - num_tokens
            self._levels[tenant] = left, self.clock()

    def _start_of(self, tenant: str) -> float:
        return max(self._now, self._ends.get(tenant, -math.inf))

    def _level(self, tenant: str, limit: float) -> float:
        level, since = self._levels.get(tenant, (limit, 0.0))
        return min(limit, level + (self.clock() - since) * limit / _MINUTE_S)
