"""Renews a router's leases of shared limits in a background task, so that requests never wait for the database."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from adapters.catalog.quota_leases import GaugeAsk, Leases, RateAsk
from adapters.errors import AdapterError
from process.lifetime import meanwhile
from router.metrics import Metrics
from router.quotas.bucket import LEASE_S
from router.quotas.leases import alone, answered, ask, not_answered
from router.quotas.quotas import Quotas

_MEMBER_S = 1.0  # between two signs of life of a router with nothing to ask for
_ALONE_S = 2.0  # without an answer, after which the router helps itself

log = logging.getLogger(__name__)

Lease = Callable[[str, Sequence[RateAsk], Sequence[GaugeAsk]], Awaitable[Leases]]


class Sharing:
    """One router's part of limits that several routers share."""

    def __init__(
        self,
        quotas: Quotas,
        lease: Lease,
        leave: Callable[[str], Awaitable[None]],
        metrics: Metrics,
        *,
        num_sharing: int = 2,  # as long as nobody has said
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lease` and `leave` ask the database. They raise AdapterError."""
        self._quotas = quotas
        self._lease = lease
        self._leave = leave
        self._metrics = metrics
        self._clock = clock
        self._member = secrets.token_hex(8)
        self._answered_at = clock()
        self._is_member = False
        self._was_answered = True
        quotas.num_sharing = num_sharing

    def running(self) -> AbstractAsyncContextManager[None]:
        """Renew leases inside the block, and give all back at its end."""
        return meanwhile(self._run(), then=lambda: self.renew(gives_back=True))

    async def renew(self, *, gives_back: bool = False) -> None:
        """Ask for the leases that are needed now."""
        quotas, now = self._quotas, self._clock()
        assert quotas.num_sharing is not None
        asked = ask(quotas.budgets, quotas.num_sharing, now, gives_back=gives_back)
        if not asked and not gives_back and self._is_member and now - self._answered_at < _MEMBER_S:
            return
        try:
            leases = await self._lease(
                self._member, [each for _, each in asked.rates], [each for _, each in asked.gauges]
            )
            if gives_back:
                await self._leave(self._member)
        except Exception as error:  # noqa: BLE001  # whatever it is, limits go on without the database
            not_answered(asked)
            self._failed(error)
            return
        answered(asked, leases)
        quotas.num_sharing = leases.num_members
        self._metrics.quota_routers.set(leases.num_members)
        for subject in asked.unused:
            budget = quotas.budgets.get(subject)
            if budget is not None and budget.is_unused_since(now):
                del quotas.budgets[subject]
        self._answered_at, self._was_answered, self._is_member = self._clock(), True, True

    def _failed(self, error: Exception) -> None:
        self._metrics.quota_lease_failures.inc()
        if self._clock() - self._answered_at < _ALONE_S:
            return
        if self._was_answered:
            self._was_answered = False
            log.warning(
                "quota database unreachable: using an equal part of each limit",
                extra={"fields": {"reason": str(error)}},
                exc_info=None if isinstance(error, AdapterError) else error,
            )
        assert self._quotas.num_sharing is not None
        alone(self._quotas.budgets.values(), self._quotas.num_sharing)

    async def _run(self) -> None:
        while True:
            try:
                await self.renew()
            except Exception:  # the edge of this task
                log.exception("quota leases not renewed")
            await asyncio.sleep(LEASE_S)
