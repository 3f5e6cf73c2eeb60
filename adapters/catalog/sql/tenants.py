"""Tenants: rows that keys, grants and adapters refer to; their removal with all that they have."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Select, Table, delete, func, insert, or_, select, update

from adapters.catalog.records import TenantSummary
from adapters.catalog.sql.database import CatalogPart, Transaction
from adapters.catalog.sql.garbage import condemn_unneeded
from adapters.catalog.sql.lookup import POINTS_AT
from adapters.catalog.sql.tables import (
    IS_SPLIT,
    AnySelect,
    adapter_revisions,
    adapters,
    alias_moves,
    alias_splits,
    aliases,
    api_keys,
    batches,
    changes,
    grants,
    removals,
    revisions,
    tenant_generations,
    tenants,
)
from adapters.errors import AccessNotFound, InvalidReference, TenantFull
from adapters.identity import is_tenant_name

# 0.1.0 counted from 1, and adds 1 to what it finds; PostgreSQL's integers end below 2**31.
_GENERATIONS = range(2**24, 2**31 - 2**24)


@dataclass(frozen=True, slots=True)
class RemovedTenant:
    """What a removal has taken out of the catalog."""

    num_adapters: int
    num_alias_moves: int  # the history
    num_keys: int
    num_grants: int
    revision_ids: tuple[str, ...]  # that no other adapter has; store and workers may still have their bytes
    generation: int  # of the name, for its next tenant
    again: bool = False  # it was removed before; all that is left of it is what an interrupted removal has left


class SqlTenants(CatalogPart):
    """The tenants of a catalog. Every method can raise CatalogUnavailable."""

    def list(self) -> Sequence[TenantSummary]:
        """All tenants by name, with what they have."""
        own = (adapters.c.tenant == tenants.c.name) & adapters.c.purged_at.is_(None)
        query = select(
            tenants.c.name,
            tenants.c.created_at,
            select(func.count()).select_from(adapters).where(own).scalar_subquery(),
            select(func.count()).select_from(api_keys).where(api_keys.c.tenant == tenants.c.name).scalar_subquery(),
            select(func.count()).select_from(grants).where(_of(tenants.c.name)).scalar_subquery(),
        ).order_by(tenants.c.name)
        return self._database.read(lambda connection: [TenantSummary(*row) for row in connection.execute(query)])

    def remove(self, tenant: str, *, has_tokens: bool = False) -> RemovedTenant:
        """Remove a tenant with its adapters, their histories, its keys and grants, in one transaction.

        The bytes of the revisions become garbage: call it while `collecting`, then remove them as `collect_garbage`
        has them removed. Routers forget all names that they know. A tenant that was removed before is not an error, so
        that what was interrupted can be finished. `has_tokens`: an issuer's tokens, or a trainer, may name the tenant,
        so the catalog need not know it, and each removal begins another generation. Otherwise raises AccessNotFound for
        a tenant that there has never been.
        """
        return self._database.write(lambda transaction: _remove(transaction, tenant, has_tokens))

    def generations(self) -> dict[str, int]:
        """Of tenants' names, by `digest_of_tenant`; names of which no tenant was removed are not in it."""
        query = select(tenant_generations.c.digest, tenant_generations.c.generation)
        return self._database.read(lambda connection: {row.digest: row.generation for row in connection.execute(query)})

    def remains(self, tenant: str) -> dict[str, int]:
        """How many rows name a tenant, by table."""
        own = select(adapters.c.id).where(adapters.c.tenant == tenant)
        conditions = {
            tenants: tenants.c.name == tenant,
            adapters: adapters.c.tenant == tenant,
            adapter_revisions: adapter_revisions.c.adapter_id.in_(own),
            aliases: aliases.c.adapter_id.in_(own),
            alias_moves: alias_moves.c.adapter_id.in_(own),
            alias_splits: alias_splits.c.adapter_id.in_(own),
            changes: changes.c.adapter_id.in_(own),
            api_keys: api_keys.c.tenant == tenant,
            grants: _of(tenant),
        }

        def count(connection: Connection) -> dict[str, int]:
            return {
                table.name: connection.execute(select(func.count()).select_from(table).where(condition)).scalar_one()
                for table, condition in conditions.items()
            }

        return self._database.read(count)

    def check_bytes(self, tenant: str, revision_id: str, num_bytes: int, quota: CatalogQuota | None) -> None:
        """Raise TenantFull if a tenant has no room for a revision of this size, unless it has the revision already."""
        if quota is None or (most := quota.bytes) is None:
            return
        query = _bytes_held(tenant).where(revisions.c.revision_id != revision_id)
        held = self._database.read(lambda connection: connection.execute(query).scalar_one())
        if held + num_bytes > most:
            raise TenantFull(
                f"tenant {tenant} may have {most} bytes of revisions; it has {held}, and this adapter takes "
                f"{num_bytes} more, packed for engines; delete adapters, which count until the operator collects "
                "garbage, or have the quota raised"
            )

    def still_in_catalog(self, revision_ids: Sequence[str]) -> Sequence[str]:
        """Those of the revisions that some adapter has."""
        return self._ids_in(revisions, revision_ids)

    def removed(self, revision_ids: Collection[str]) -> set[str]:
        """Those of the revisions that were removed, and that no adapter has again."""
        found = self._ids_in(removals, list(revision_ids))
        return set(found).difference(self.still_in_catalog(found))

    def _ids_in(self, table: Table, revision_ids: Sequence[str]) -> Sequence[str]:
        queries = [select(table.c.revision_id).where(table.c.revision_id.in_(ids)) for ids in batches(revision_ids)]
        return self._database.read(
            lambda connection: [found for query in queries for found in connection.execute(query).scalars()]
        )


def digest_of_tenant(tenant: str) -> str:
    """By which the catalog knows the name of a tenant that was removed."""
    return hashlib.sha256(tenant.encode()).hexdigest()


def ensure_tenant(transaction: Transaction, tenant: str) -> bool:
    """Insert the tenant's row; False if there is one already. Raises InvalidReference."""
    if not is_tenant_name(tenant):
        raise InvalidReference(
            f"{tenant[:80]!r} is not a tenant's name: 1 to 63 letters, digits, '.', '_' or '-', the first of them a "
            "letter or digit, all in ASCII"
        )

    connection = transaction.connection
    if connection.execute(select(tenants.c.name).where(tenants.c.name == tenant)).first() is not None:
        return False
    connection.execute(insert(tenants), {"name": tenant, "created_at": transaction.now})
    return True


def _remove(transaction: Transaction, tenant: str, has_tokens: bool) -> RemovedTenant:
    connection = transaction.connection
    if connection.execute(select(tenants.c.name).where(tenants.c.name == tenant)).first() is None:
        generation = generation_of(connection, tenant)
        again = generation > 0
        if has_tokens and is_tenant_name(tenant):  # tokens may have used this generation, and left no row
            generation = _next_generation(connection, tenant)
            transaction.change("tenants")
        elif not again:
            raise AccessNotFound(f"there is no tenant {tenant[:80]!r}; `prelude tenants list` shows them")
        return RemovedTenant(0, 0, 0, 0, (), generation, again=again)
    own = select(adapters.c.id).where(adapters.c.tenant == tenant)
    owned = select(adapter_revisions.c.content_id).distinct().where(adapter_revisions.c.adapter_id.in_(own))
    contents = list(connection.execute(owned).scalars())
    removed = {}
    for table in (aliases, alias_moves, alias_splits, adapter_revisions):
        removed[table.name] = connection.execute(delete(table).where(table.c.adapter_id.in_(own))).rowcount
    revision_ids = condemn_unneeded(connection, contents, transaction.now, unstored_too=True)
    # The changes stay, numbered without gaps, but say no more what they were about.
    connection.execute(update(changes).where(changes.c.adapter_id.in_(own)).values(adapter_id=None))
    counts = [
        connection.execute(delete(table).where(condition)).rowcount
        for table, condition in ((adapters, adapters.c.tenant == tenant), (api_keys, api_keys.c.tenant == tenant))
    ]
    num_grants = connection.execute(delete(grants).where(_of(tenant))).rowcount
    connection.execute(delete(tenants).where(tenants.c.name == tenant))
    generation = _next_generation(connection, tenant)
    transaction.change("tenants")
    return RemovedTenant(counts[0], removed["alias_moves"], counts[1], num_grants, tuple(revision_ids), generation)


def generation_of(connection: Connection, tenant: str) -> int:
    """Of the present tenant of this name; 0 if none of it was removed."""
    table = tenant_generations
    found = connection.execute(select(table.c.generation).where(table.c.digest == digest_of_tenant(tenant))).scalar()
    return found or 0


def _next_generation(connection: Connection, tenant: str) -> int:
    """A random one: a count would come again in a catalog that is restored, for another tenant of the name."""
    table, digest = tenant_generations, digest_of_tenant(tenant)
    generation = _GENERATIONS.start + secrets.randbelow(len(_GENERATIONS))
    connection.execute(delete(table).where(table.c.digest == digest))
    connection.execute(insert(table), {"digest": digest, "generation": generation})
    return generation


def _of(tenant: str | ColumnElement[str]) -> ColumnElement[bool]:
    return or_(grants.c.owner == tenant, grants.c.grantee == tenant)


@dataclass(frozen=True, slots=True)
class CatalogQuota:
    """The most that a tenant may have in the catalog. None: no limit."""

    adapters: int | None = None
    revisions: int | None = None
    bytes: int | None = None  # of revisions; those of several adapters count once
    pins: int | None = None  # revisions in memory only that aliases point at, so that workers keep them


@contextmanager
def no_more_pins(connection: Connection, tenant: str, quota: CatalogQuota | None) -> Iterator[None]:
    """Raise TenantFull if what is done inside adds a pin beyond those that the tenant may have."""
    if quota is None or quota.pins is None:
        yield
        return
    before = _num_pins(connection, tenant)
    yield
    if (found := _num_pins(connection, tenant)) > max(before, quota.pins):
        raise TenantFull(
            f"tenant {tenant} may have {quota.pins} pins of revisions that are in memory only, and would have {found}; "
            "point its aliases at stored revisions, delete adapters, or have the quota raised"
        )


def _num_pins(connection: Connection, tenant: str) -> int:
    query = (
        select(func.count(adapter_revisions.c.content_id.distinct()))
        .select_from(aliases)
        .join(adapters, adapters.c.id == aliases.c.adapter_id)
        .outerjoin(alias_splits, IS_SPLIT)
        .join(adapter_revisions, POINTS_AT)
        .join(revisions, revisions.c.id == adapter_revisions.c.content_id)
        .where(adapters.c.tenant == tenant, adapters.c.deleted_at.is_(None), revisions.c.stored.is_(False))
    )
    return connection.execute(query).scalar_one()


def _owned(tenant: str) -> Select[tuple[int]]:
    """The ids of a tenant's adapters. What is deleted counts until it is collected."""
    return select(adapters.c.id).where(adapters.c.tenant == tenant, adapters.c.purged_at.is_(None))


def _bytes_held(tenant: str) -> AnySelect:
    own = adapter_revisions.c.adapter_id.in_(_owned(tenant))
    contents = select(adapter_revisions.c.content_id).where(own)
    return select(func.coalesce(func.sum(revisions.c.bytes), 0)).where(revisions.c.id.in_(contents))


def check_quota(connection: Connection, tenant: str, quota: CatalogQuota) -> None:
    """Raise TenantFull if the tenant has more than it may."""
    ids = _owned(tenant)
    owned_revisions = select(adapter_revisions.c.number).where(adapter_revisions.c.adapter_id.in_(ids))
    counts = (
        ("adapters", quota.adapters, select(func.count()).select_from(ids.subquery())),
        ("revisions", quota.revisions, select(func.count()).select_from(owned_revisions.subquery())),
        ("bytes of revisions", quota.bytes, _bytes_held(tenant)),
    )
    for what, most, query in counts:
        if most is not None and (found := connection.execute(query).scalar_one()) > most:
            raise TenantFull(
                f"tenant {tenant} may have {most} {what}, and would have {found}; delete adapters, which count until "
                "the operator collects garbage, or have the quota raised"
            )
