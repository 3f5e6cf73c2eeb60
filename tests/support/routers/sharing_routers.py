"""Routers that share limits through a catalog in memory, in virtual time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from adapters.catalog.quota_leases import GaugeAsk, Leases, Pool, RateAsk, lease_gauge, lease_rate
from adapters.errors import CatalogUnavailable
from adapters.scopes import Scope
from cluster.config.quotas import QuotasConfig
from router.errors import QuotaExceeded
from router.identity.access import Principal
from router.metrics import Metrics
from router.quotas.budget import Use
from router.quotas.quotas import Admission, Quotas
from router.quotas.sharing import Sharing

STEP_S = 0.1


def caller(tenant: str, key_id: str | None = None) -> Principal:
    """A caller of a tenant who may infer, and nothing else."""
    return Principal(tenant, tenant, frozenset({Scope.INFER}), key_id)


ACME, BETA = caller("acme"), caller("beta")


@dataclass
class Database:
    """The catalog's part, in memory."""

    now: float = 1000.0
    is_up: bool = True
    error: Exception = field(default_factory=lambda: CatalogUnavailable("down"))  # while it is not
    pools: dict[str, Pool] = field(default_factory=dict)
    holdings: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    members: set[str] = field(default_factory=set)

    async def lease(self, member: str, rates: Sequence[RateAsk], gauges: Sequence[GaugeAsk]) -> Leases:
        if not self.is_up:
            raise self.error
        self.members.add(member)
        granted, allowed = [], []
        for each in rates:
            pool, amount = lease_rate(self.pools.get(each.subject), each, self.now, len(self.members))
            self.pools[each.subject] = pool
            granted.append((amount, pool.level))
        for gauge in gauges:
            others = [
                held for (subject, who), held in self.holdings.items() if subject == gauge.subject and who != member
            ]
            allowed.append(lease_gauge(gauge, others))
            self.holdings[gauge.subject, member] = gauge.wanted, max(allowed[-1], gauge.used)
        return Leases(len(self.members), granted, allowed)

    async def leave(self, member: str) -> None:
        self.members.discard(member)
        for key in [key for key in self.holdings if key[1] == member]:
            del self.holdings[key]


class Router:
    def __init__(self, database: Database, config: QuotasConfig) -> None:
        self.metrics = Metrics()
        self.quotas = Quotas(config, self.metrics, clock=lambda: database.now)
        self.sharing = Sharing(self.quotas, database.lease, database.leave, self.metrics, clock=lambda: database.now)
        self.num_admitted = 0

    def offer(self, num_requests: int, use: Use) -> None:
        """Requests that end at once."""
        for _ in range(num_requests):
            self.wait_s(use)

    def begun(self, use: Use) -> Admission | None:
        """A request that runs until its admission is left; None: it is refused."""
        admission = self.quotas.admission(ACME).__enter__()
        try:
            admission.take(use)
        except QuotaExceeded:
            return admission.__exit__(None, None, None)
        return admission

    def wait_s(self, use: Use) -> float | None:
        """How long a request is told to wait; None: it is admitted, and ends."""
        try:
            with self.quotas.admission(ACME) as admission:
                admission.take(use)
                admission.settle(use.prompt_tokens, use.output_tokens)
        except QuotaExceeded as error:
            return error.retry_after_s or 0.0
        self.num_admitted += 1
        return None


def routers(database: Database, num: int = 2, **limits: float) -> list[Router]:
    return [Router(database, QuotasConfig.model_validate({"default": limits})) for _ in range(num)]


async def run(database: Database, group: Sequence[Router], offered: Sequence[int], use: Use, seconds: float) -> None:
    """Each router gets so many requests in every step. They renew their leases every second step, not together."""
    for step in range(round(seconds / STEP_S)):
        database.now += STEP_S
        for number, (router, count) in enumerate(zip(group, offered, strict=True)):
            router.offer(count, use)
            if step % 2 == number % 2:
                await router.sharing.renew()
