"""Resolve a reference by one indexed query, and explain why it names nothing."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from sqlalchemy import Connection, bindparam, func, select

from adapters.catalog.records import AdapterRevision, AliasSplit, AliasTarget
from adapters.catalog.sql.tables import (
    IS_SPLIT,
    AnyRow,
    AnySelect,
    adapter_revisions,
    adapters,
    alias_splits,
    aliases,
    batches,
    manifests,
    revisions,
)
from adapters.errors import AdapterNotFound
from adapters.identity import AdapterReference
from adapters.model.manifest import Manifest

_SHOWN_ALIASES = 10

_FOUND: AnySelect = (
    select(
        adapters.c.id.label("adapter_id"),
        adapters.c.tenant,
        adapters.c.name,
        adapters.c.shares_prefixes,
        adapter_revisions.c.number,
        adapter_revisions.c.created_at,
        adapter_revisions.c.warnings,
        revisions.c.revision_id,
        revisions.c.bytes,
        revisions.c.stored,
        manifests.c.json,
    )
    .select_from(adapters)
    .join(adapter_revisions, adapter_revisions.c.adapter_id == adapters.c.id)
    .join(revisions, revisions.c.id == adapter_revisions.c.content_id)
    .join(manifests, manifests.c.id == revisions.c.manifest_id)
    .where(
        adapters.c.tenant == bindparam("tenant"),
        adapters.c.name == bindparam("name"),
        adapters.c.deleted_at.is_(None),
    )
)
# Joins revisions to the aliases that point at them: with `IS_SPLIT` joined before it, to both of a split one.
POINTS_AT = (adapter_revisions.c.adapter_id == aliases.c.adapter_id) & adapter_revisions.c.number.in_(
    [aliases.c.number, alias_splits.c.newer]
)
BY_ALIAS = (
    _FOUND.join(aliases, aliases.c.adapter_id == adapters.c.id)
    .outerjoin(alias_splits, IS_SPLIT)
    .where(aliases.c.alias == bindparam("pin"), POINTS_AT)
    .add_columns(alias_splits.c.percent)
)
BY_NUMBER = _FOUND.where(adapter_revisions.c.number == bindparam("pin"))
BY_REVISION_ID = _FOUND.where(revisions.c.revision_id == bindparam("pin"))

_ADAPTER = select(adapters.c.id, adapters.c.deleted_at, adapters.c.purged_at).where(
    adapters.c.tenant == bindparam("tenant"), adapters.c.name == bindparam("name")
)
_KEPT = select(
    revisions.c.revision_id,
    revisions.c.stored,
    select(aliases.c.alias)
    .join(adapters, adapters.c.id == aliases.c.adapter_id)
    .outerjoin(alias_splits, IS_SPLIT)
    .join(adapter_revisions, POINTS_AT)
    .where(adapter_revisions.c.content_id == revisions.c.id, adapters.c.deleted_at.is_(None))
    .exists()
    .label("is_wanted"),
)
_parsed = lru_cache(maxsize=256)(Manifest.from_json)


def find_revision(connection: Connection, wanted: AdapterReference) -> AdapterRevision | None:
    """The revision that a reference names, of two the older; None if the adapter does not have it or is deleted."""
    query, pin = _query_of(wanted)
    rows = connection.execute(query, {"tenant": wanted.tenant, "name": wanted.name, "pin": pin}).all()
    if len(rows) < 2:
        return revision_of(rows[0]) if rows else None
    older, newer = sorted(rows, key=lambda row: row.number)
    split = AliasSplit(str(wanted), AliasTarget(older.number, newer.number, older.percent), revision_of(newer))
    return replace(revision_of(older), split=split)


def revision_of(row: AnyRow) -> AdapterRevision:
    """The record of a row of these queries."""
    return AdapterRevision(
        row.tenant,
        row.name,
        row.number,
        row.revision_id,
        _parsed(row.json),
        row.bytes,
        row.created_at,
        row.stored,
        row.shares_prefixes,
        tuple(row.warnings.splitlines()),
    )


def find_adapter(connection: Connection, tenant: str, name: str) -> AnyRow | None:
    """id, deleted_at and purged_at of an adapter, deleted or not."""
    return connection.execute(_ADAPTER, {"tenant": tenant, "name": name}).first()


def require_adapter(connection: Connection, tenant: str, name: str) -> int:
    """The id of an adapter that is not deleted. Raises AdapterNotFound."""
    row = find_adapter(connection, tenant, name)
    if row is None or row.deleted_at is not None:
        raise not_found(connection, AdapterReference(tenant, name))
    return row.id


def kept_in_memory(connection: Connection, revision_ids: Sequence[str]) -> dict[str, bool]:
    """See `SqlCatalog.kept_in_memory`."""
    found: dict[str, bool] = {}
    for batch in batches(revision_ids):
        rows = connection.execute(_KEPT.where(revisions.c.revision_id.in_(batch)))
        found |= {row.revision_id: not row.stored and row.is_wanted for row in rows}
    return found


def not_found(connection: Connection, wanted: AdapterReference) -> AdapterNotFound:
    """The error for a missing revision, with what exists instead. Only for failures: it takes some milliseconds."""
    full_name = wanted.full_name
    row = find_adapter(connection, wanted.tenant, wanted.name)
    if row is None:
        return AdapterNotFound(f"there is no adapter {full_name!r}; `prelude adapters list` shows the names")
    if row.deleted_at is not None:
        remedy = "import it again" if row.purged_at is not None else "restore it"
        return AdapterNotFound(
            f"the adapter {full_name!r} was deleted on {row.deleted_at:%Y-%m-%d %H:%M} UTC; {remedy}"
        )
    if wanted.alias is not None:
        owned = select(aliases.c.alias).where(aliases.c.adapter_id == row.id).order_by(aliases.c.alias)
        names = connection.execute(owned.limit(_SHOWN_ALIASES)).scalars().all()
        return AdapterNotFound(
            f"the adapter {full_name!r} has no alias {wanted.alias!r}; it has {', '.join(map(repr, names))}"
        )
    newest = connection.execute(
        select(func.max(adapter_revisions.c.number)).where(adapter_revisions.c.adapter_id == row.id)
    ).scalar_one()
    pin = wanted.revision_id or f"r{wanted.number}"
    return AdapterNotFound(f"the adapter {full_name!r} has no revision {pin}; its newest is r{newest}")


def _query_of(wanted: AdapterReference) -> tuple[AnySelect, str | int | None]:
    if wanted.revision_id is not None:
        return BY_REVISION_ID, wanted.revision_id
    if wanted.number is not None:
        return BY_NUMBER, wanted.number
    return BY_ALIAS, wanted.alias
