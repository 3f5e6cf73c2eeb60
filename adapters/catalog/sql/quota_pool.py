"""Limits that routers share: the unleased rest, and each router's lease. Full pools and empty leases have no row."""

import hashlib
from collections.abc import Sequence

from sqlalchemy import Connection, delete, func, insert, select, text

from adapters.catalog.quota_leases import GaugeAsk, Leases, Pool, RateAsk, lease_gauge, lease_rate
from adapters.catalog.sql.database import CatalogPart
from adapters.catalog.sql.locks import AdvisoryLock, take
from adapters.catalog.sql.tables import quota_holdings, quota_members, quota_pools

MEMBER_S = 10.0  # a router that was not seen for so long holds nothing


class SqlQuotaPool(CatalogPart):
    """Every method can raise CatalogUnavailable."""

    def lease(self, member: str, rates: Sequence[RateAsk], gauges: Sequence[GaugeAsk]) -> Leases:
        """Answer a router, in one transaction that waits for no change of the catalog."""
        return self._database.transact(lambda connection: _lease(connection, member, rates, gauges))

    def leave(self, member: str) -> None:
        """A router that has given back what it had shares no more."""

        def leave(connection: Connection) -> None:
            connection.execute(delete(quota_holdings).where(quota_holdings.c.member == member))
            connection.execute(delete(quota_members).where(quota_members.c.member == member))

        self._database.transact(leave)


def _lease(connection: Connection, member: str, rates: Sequence[RateAsk], gauges: Sequence[GaugeAsk]) -> Leases:
    take(connection, AdvisoryLock.LEASE)
    if connection.dialect.name == "postgresql":
        now = float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
    else:
        now = float(connection.execute(text("SELECT (julianday('now') - 2440587.5) * 86400.0")).scalar_one())
    num_members = _join(connection, member, now)
    return Leases(
        num_members,
        _lease_rates(connection, rates, now, num_members),
        _lease_gauges(connection, member, gauges),
    )


def _join(connection: Connection, member: str, now: float) -> int:
    is_gone = ~quota_members.c.seen_at.between(now - MEMBER_S, now + MEMBER_S)  # or the clock was set back since
    gone = select(quota_members.c.member).where(is_gone)
    connection.execute(delete(quota_holdings).where(quota_holdings.c.member.in_(gone)))
    connection.execute(delete(quota_members).where(is_gone | (quota_members.c.member == member)))
    connection.execute(insert(quota_members), {"member": member, "seen_at": now})
    return connection.execute(select(func.count()).select_from(quota_members)).scalar_one()


def _lease_rates(
    connection: Connection, asks: Sequence[RateAsk], now: float, num_members: int
) -> list[tuple[float, float]]:
    if not asks:
        return []
    digests = [_digest(ask.subject) for ask in asks]
    here = quota_pools.c.subject.in_(digests)
    pools = {row.subject: Pool(row.level, row.at) for row in connection.execute(select(quota_pools).where(here))}
    answers, rows = [], []
    for digest, ask in zip(digests, asks, strict=True):
        pool, granted = lease_rate(pools.get(digest), ask, now, num_members)
        answers.append((granted, pool.level))
        full_at = now + (ask.capacity - pool.level) / ask.rate
        rows.append({"subject": digest, "level": pool.level, "at": pool.at, "full_at": full_at})
    connection.execute(delete(quota_pools).where(here | (quota_pools.c.full_at < now)))
    connection.execute(insert(quota_pools), rows)
    return answers


def _lease_gauges(connection: Connection, member: str, asks: Sequence[GaugeAsk]) -> list[float]:
    if not asks:
        return []
    digests = [_digest(ask.subject) for ask in asks]
    here = quota_holdings.c.subject.in_(digests)
    others: dict[str, list[tuple[float, float]]] = {}
    for row in connection.execute(select(quota_holdings).where(here, quota_holdings.c.member != member)):
        others.setdefault(row.subject, []).append((row.wanted, row.held))
    answers, rows = [], []
    for digest, ask in zip(digests, asks, strict=True):
        allowed = lease_gauge(ask, others.get(digest, ()))
        answers.append(allowed)
        held = max(allowed, ask.used)
        if held or ask.wanted:
            rows.append({"subject": digest, "member": member, "wanted": ask.wanted, "held": held})
    connection.execute(delete(quota_holdings).where(here, quota_holdings.c.member == member))
    if rows:
        connection.execute(insert(quota_holdings), rows)
    return answers


def _digest(subject: str) -> str:
    """Rows name no tenant, so a tenant's deletion leaves nothing of it here."""
    return hashlib.sha256(subject.encode()).hexdigest()
