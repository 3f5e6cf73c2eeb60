"""Counts requests' use against the quotas of their tenants and keys."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

from adapters.catalog.sql.tenants import CatalogQuota
from cluster.config.quotas import QuotasConfig, UseLimits
from router.errors import QuotaExceeded
from router.identity.access import Principal
from router.metrics import Metrics
from router.protocol.field_values import TYPICAL_ANSWER_TOKENS
from router.quotas.admission_queue import AdmissionQueue, HasCapacity, Turn
from router.quotas.budget import CHANGES, PUSHES, SEQUENCES, Budget, Shortage, Use
from router.quotas.leases import share_out
from router.quotas.rate_headers import duration, rate_headers

_MAX_BUDGETS = 1000  # before idle ones are forgotten: each scrape of the metrics looks at all
_PERIODS = {
    "requests": "a second",
    "prompt_tokens": "a minute",
    "output_tokens": "a minute",
    "pushes": "an hour",
    "changes": "a minute",
}
_TENANT = "tenant:"  # before a tenant's name in subjects
OTHERS = "other"  # label of tenants that cluster.yaml does not name


class Quotas:
    """The quotas of one router. Owns all budgets. Without a configuration, nothing is limited."""

    def __init__(
        self,
        config: QuotasConfig | None,
        metrics: Metrics,
        has_capacity: HasCapacity | None = None,
        clock: Callable[[], float] = time.monotonic,
        present_name: Callable[[str], str] = str,
    ) -> None:
        """`has_capacity`: whether the fleet has capacity for what is about to be placed; None: requests never queue.

        `present_name`: tells a tenant from earlier ones of its name, with a number behind `#`.
        """
        self._config = config
        self.is_configured = config is not None
        fair_queue = None if config is None or has_capacity is None else config.fair_queue
        self.queue: AdmissionQueue | None = None
        if config is not None and has_capacity is not None and fair_queue is not None:
            self.queue = queue = AdmissionQueue(config, fair_queue, has_capacity, metrics)
            metrics.queued.set_function(lambda: queue.num_waiting)
        self._metrics = metrics
        # A metric's own `labels` costs several times what counting does. Labels are few: tenants of cluster.yaml.
        tokens = metrics.tenant_tokens
        self._token_counters = cache(lambda label: (tokens.labels(label, "prompt"), tokens.labels(label, "output")))
        self.now, self._present_name = clock, present_name
        self.budgets: dict[str, Budget | None] = {}  # by subject; None: it has no limits
        self._sweep_at = _MAX_BUDGETS
        self.num_sharing: int | None = None  # routers that share every limit; None: this one alone has them
        metrics.quota_use.read = self.used_shares

    @property
    def waiting(self) -> tuple[int, float]:
        """Requests that wait for their turn, and tokens of their prompts."""
        return (0, 0.0) if self.queue is None else (self.queue.num_waiting, self.queue.tokens_waiting)

    def used_shares(self) -> dict[tuple[str, str], float]:
        """The used share of each tenant's limits, by (label, limit); 1: exhausted. `OTHERS`: the rest's largest."""
        now, shares = self.now(), dict[tuple[str, str], float]()
        for subject, budget in self.budgets.items():
            if budget is None or not subject.startswith(_TENANT):
                continue
            for bucket in budget.buckets.values():  # not the budget, of which this is no use
                bucket.refill(now)
            label = self.label_of(subject.removeprefix(_TENANT).partition("#")[0])
            used = {name: 1 - bucket.remaining / bucket.capacity for name, bucket in budget.buckets.items()}
            if budget.sequences is not None:
                used[SEQUENCES] = budget.sequences.used / budget.sequences.limit
            for name, share in used.items():
                shares[label, name] = max(share, shares.get((label, name), 0.0))
        return shares

    def admission(self, principal: Principal) -> Admission:
        """A request's admission, to be entered before its body is read. Entering raises QuotaExceeded."""
        return Admission(self, principal)

    def label_of(self, tenant: str) -> str:
        """The tenant's label in metrics."""
        return tenant if self._config is not None and tenant in self._config.tenants else OTHERS

    def of_caller(self, principal: Principal) -> list[Budget]:
        """The budgets of the tenant and of its key."""
        assert self._config is not None
        config, tenant, key_id = self._config, principal.tenant, principal.key_id
        subject = f"{_TENANT}{self._present_name(tenant)}"
        found = [self._budget(subject, f"tenant {tenant}", lambda: config.of_tenant(tenant))]
        if key_id is not None:
            found.append(
                self._budget(
                    f"key:{key_id}",
                    f"key {key_id}",
                    lambda: config.keys.get(key_id) or config.of_tenant(tenant).each_key,
                )
            )
        return [budget for budget in found if budget is not None]

    def take_push(self, tenant: str) -> None:
        """Count an import or a push of the tenant's adapters. Raises QuotaExceeded."""
        self._take_change(tenant, PUSHES)

    def take_change(self, tenant: str) -> None:
        """Count a change of the tenant's adapters, of any kind. Raises QuotaExceeded."""
        self._take_change(tenant, CHANGES)

    def _take_change(self, tenant: str, limit: str) -> None:
        if self._config is None:
            return
        subject = f"changes:{self._present_name(tenant)}"
        budget = self.budgets.get(subject)
        if budget is None:
            quota = self._config.of_tenant(tenant)
            budget = self._kept(subject, Budget(f"tenant {tenant}", UseLimits(), self.now(), quota))
        budget.refill(self.now())
        if (shortage := budget.request_shortage(limit)) is not None:
            raise self.refused(budget, shortage, [], tenant)
        budget.take_request(limit)

    def catalog_quota(self, tenant: str) -> CatalogQuota | None:
        """The tenant's limits in the catalog; None: unlimited."""
        if self._config is None:
            return None
        quota = self._config.of_tenant(tenant)
        found = CatalogQuota(quota.adapters, quota.revisions, quota.adapter_bytes, quota.pins)
        return None if found == CatalogQuota() else found

    def refused(self, budget: Budget, shortage: Shortage, budgets: list[Budget], tenant: str) -> QuotaExceeded:
        """The error for a limit that is reached."""
        self._metrics.quota_refusals.labels(self.label_of(tenant), shortage.limit).inc()
        if shortage.is_for_ever:
            error = QuotaExceeded(
                f"{budget.label} has a limit of {shortage.limit} of {shortage.most:g} at a time, and this request asks "
                f"for {shortage.asked:g}, so it can never be admitted; ask for less"
            )
            error.retryable = False
            error.headers = {**rate_headers(budgets), "x-should-retry": "false"}  # else OpenAI's clients retry a 429
            return error
        if shortage.wait_s is None:
            what, again = f"{shortage.limit} of {shortage.most:g} at a time", "when some of its requests have ended"
        else:
            rate = f"{shortage.most:g} {_PERIODS.get(shortage.limit, '')}".strip()
            what, again = f"{shortage.limit} of {rate}", f"in {duration(shortage.wait_s)}"
        error = QuotaExceeded(
            f"{budget.label} has reached its limit of {what} (this request asks for {shortage.asked:g}); try again "
            f"{again}",
            retry_after_s=shortage.wait_s,
        )
        error.headers = rate_headers(budgets)
        if shortage.wait_s is not None:
            error.headers["retry-after-ms"] = str(max(1, round(1000 * shortage.wait_s)))
        return error

    def used(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """Count what a request has used for the metrics."""
        prompt, output = self._token_counters(self.label_of(tenant))
        prompt.inc(prompt_tokens)
        output.inc(output_tokens)

    def _budget(self, subject: str, label: str, limits: Callable[[], UseLimits]) -> Budget | None:
        try:
            return self.budgets[subject]
        except KeyError:
            pass
        if len(self.budgets) >= self._sweep_at:
            self._forget_idle()
        found = limits()
        if not found.are_set:
            self.budgets[subject] = None
            return None
        return self._kept(subject, Budget(label, found, self.now()))

    def _kept(self, subject: str, budget: Budget) -> Budget:
        self.budgets[subject] = budget
        if self.num_sharing is not None:
            share_out(budget, self.num_sharing)
        return budget

    def _forget_idle(self) -> None:
        now = self.now()
        for subject, budget in list(self.budgets.items()):
            if budget is not None and self.num_sharing is not None:
                continue  # it is forgotten when it has been given back (`Sharing`)
            if budget is not None:
                budget.refill(now)
            if budget is None or budget.is_idle:
                del self.budgets[subject]
        self._sweep_at = max(_MAX_BUDGETS, 2 * len(self.budgets))


class Admission:
    """One request's admission. Without quotas it has no budgets, so nothing is limited."""

    __slots__ = (
        "_budgets", "_output_tokens", "_principal", "_prompt_tokens", "_quotas", "_turn", "_use", "is_counted",
    )  # fmt: skip

    def __init__(self, quotas: Quotas, principal: Principal) -> None:
        self._quotas = quotas
        self._principal = principal
        self.is_counted = quotas.is_configured
        self._budgets = quotas.of_caller(principal) if self.is_counted else []
        self._use: Use | None = None
        self._prompt_tokens: int | None = None
        self._output_tokens: int | None = None
        self._turn: Turn | None = None

    def __enter__(self) -> Admission:
        for budget in self._budgets:
            budget.refill(self._quotas.now())
            if (shortage := budget.request_shortage()) is not None:
                raise self._refused(budget, shortage)
        for budget in self._budgets:
            budget.take_request()
            budget.num_running += 1
        return self

    def __exit__(self, *_: object) -> None:
        if self._prompt_tokens or self._output_tokens:
            self._quotas.used(self._principal.tenant, self._prompt_tokens or 0, self._output_tokens or 0)
        if not self.is_counted:
            return
        now = self._quotas.now()
        for budget in self._budgets:
            budget.end(now)
            if self._use is not None:
                budget.settle(self._use, self._prompt_tokens, self._output_tokens)
        if self._turn is not None:
            self._turn.settle(self._prompt_tokens, self._output_tokens)

    def take(self, use: Use) -> None:
        """Take what the request asks for. Raises QuotaExceeded, having taken nothing."""
        budgets, now = self._budgets, self._quotas.now()
        for budget in budgets:
            if (shortage := budget.never(use)) is not None:
                raise self._refused(budget, shortage)
        for budget in budgets:
            budget.refill(now)
            if (shortage := budget.shortage(use)) is not None:
                raise self._refused(budget, shortage)
        for budget in budgets:
            budget.take(use)
        self._use = use

    async def turn(self) -> AbstractContextManager[Turn | None]:
        """Wait for the request's turn. The caller enters it as a context and runs inside. None: requests never queue.

        Raises QueueFull and QueuedTooLong.
        """
        queue, use = self._quotas.queue, self._use
        if queue is None or use is None:
            return nullcontext()
        self._turn = await queue.take(
            self._principal.tenant,
            prompt_tokens=use.prompt_tokens,
            # What it may generate says little of what it will; the rest is settled.
            output_tokens=min(use.output_tokens, TYPICAL_ANSWER_TOKENS * use.sequences),
            num_sequences=use.sequences,
        )
        return self._turn

    def settle(self, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """Settle the request's actual use; None: unknown."""
        self._prompt_tokens, self._output_tokens = prompt_tokens, output_tokens

    def headers(self) -> dict[str, str]:
        """The headers that say how much of the limits is left."""
        return rate_headers(self._budgets)

    def _refused(self, budget: Budget, shortage: Shortage) -> QuotaExceeded:
        return self._quotas.refused(budget, shortage, self._budgets, self._principal.tenant)
