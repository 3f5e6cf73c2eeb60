"""Queries for pages of adapters, and for one adapter in full."""

from dataclasses import fields
from typing import Any

from sqlalchemy import Connection, func, select, tuple_

from adapters.catalog.records import (
    AdapterDetails,
    AdapterSummary,
    AliasMove,
    AliasTarget,
    RevisionContent,
    RevisionSummary,
)
from adapters.catalog.sql.grants import visible_to
from adapters.catalog.sql.lookup import not_found, require_adapter
from adapters.catalog.sql.tables import (
    IS_SPLIT,
    AnyRow,
    AnySelect,
    adapter_revisions,
    adapters,
    alias_moves,
    alias_splits,
    aliases,
    revisions,
)
from adapters.identity import LATEST, AdapterReference
from adapters.scopes import Permission

_CONTENT = (
    revisions.c.revision_id,
    revisions.c.kinds,
    revisions.c.positions,
    revisions.c.trained_positions,
    revisions.c.base_model,
    revisions.c.bytes,
    revisions.c.stored,
)
_SUMMARIES: AnySelect = (
    select(
        adapters.c.tenant,
        adapters.c.name,
        adapters.c.created_at,
        adapters.c.deleted_at,
        adapter_revisions.c.number,
        *_CONTENT,
    )
    .select_from(adapters)
    .join(aliases, (aliases.c.adapter_id == adapters.c.id) & (aliases.c.alias == LATEST))
    .join(
        adapter_revisions,
        (adapter_revisions.c.adapter_id == adapters.c.id) & (adapter_revisions.c.number == aliases.c.number),
    )
    .join(revisions, revisions.c.id == adapter_revisions.c.content_id)
)
_AFTER_ALL_NAMES = "~"  # sorts after every character that a name may have
MOVES: AnySelect = select(alias_moves, *(each for each in alias_splits.c if each.name not in alias_moves.c)).outerjoin(
    alias_splits,
    (alias_splits.c.adapter_id == alias_moves.c.adapter_id)
    & (alias_splits.c.alias == alias_moves.c.alias)
    & (alias_splits.c.sequence == alias_moves.c.sequence),
)


def list_adapters(
    connection: Connection,
    tenant: str | None,
    prefix: str | None,
    after: tuple[str, str] | None,
    limit: int,
    deleted: bool,
    viewer: tuple[str, Permission | None] | None,
) -> list[AdapterSummary]:
    """See `SqlCatalog.list`."""
    query = _SUMMARIES.order_by(adapters.c.tenant, adapters.c.name).limit(limit)
    query = query.where(adapters.c.deleted_at.is_not(None) if deleted else adapters.c.deleted_at.is_(None))
    if tenant is not None:
        query = query.where(adapters.c.tenant == tenant)
    if viewer is not None:
        query = query.where(visible_to(*viewer))
    if prefix:
        query = query.where(adapters.c.name >= prefix, adapters.c.name < prefix + _AFTER_ALL_NAMES)
    if after is not None and tenant is not None:
        query = query.where(adapters.c.name > after[1])
    elif after is not None:
        query = query.where(tuple_(adapters.c.tenant, adapters.c.name) > after)
    return [_summary_of(row) for row in connection.execute(query)]


def show_adapter(connection: Connection, tenant: str, name: str, limit: int) -> AdapterDetails:
    """See `SqlCatalog.show`."""
    adapter_id = require_adapter(connection, tenant, name)
    summary = connection.execute(_SUMMARIES.where(adapters.c.id == adapter_id)).one()
    owned = (
        select(aliases.c.alias, aliases.c.number, alias_splits.c.newer, alias_splits.c.percent)
        .outerjoin(alias_splits, IS_SPLIT)
        .where(aliases.c.adapter_id == adapter_id)
        .order_by(aliases.c.alias)
    )
    targets = {row.alias: target_of(row.number, row.newer, row.percent) for row in connection.execute(owned)}
    numbered = adapter_revisions.c.adapter_id == adapter_id
    newest = (
        select(adapter_revisions.c.number, adapter_revisions.c.created_at, adapter_revisions.c.warnings, *_CONTENT)
        .join(revisions, revisions.c.id == adapter_revisions.c.content_id)
        .where(numbered)
        .order_by(adapter_revisions.c.number.desc())
        .limit(limit)
    )
    return AdapterDetails(
        summary=_summary_of(summary),
        aliases={alias: target.number for alias, target in targets.items()},
        splits={alias: target for alias, target in targets.items() if target.newer is not None},
        revisions=tuple(
            RevisionSummary(**_content_of(row), created_at=row.created_at, warnings=tuple(row.warnings.splitlines()))
            for row in connection.execute(newest)
        ),
        num_revisions=connection.execute(
            select(func.count()).select_from(adapter_revisions).where(numbered)
        ).scalar_one(),
    )


def list_moves(connection: Connection, tenant: str, name: str, alias: str, limit: int) -> list[AliasMove]:
    """See `SqlCatalog.alias_history`."""
    moves = (
        MOVES.where(
            alias_moves.c.adapter_id == require_adapter(connection, tenant, name),
            alias_moves.c.alias == alias,
        )
        .order_by(alias_moves.c.sequence.desc())
        .limit(limit)
    )
    if not (found := [move_of(row) for row in connection.execute(moves)]):  # every alias has a first move
        raise not_found(connection, AdapterReference(tenant, name, alias=alias))
    return found


def move_of(row: AnyRow) -> AliasMove:
    """The record of a row of `MOVES`."""
    origin = None if row.from_number is None else target_of(row.from_number, row.from_newer, row.from_percent)
    target = target_of(row.to_number, row.newer, row.percent)
    return AliasMove(row.sequence, row.alias, origin, target, row.moved_at, row.moved_by)


def target_of(number: int, newer: int | None, percent: int | None) -> AliasTarget:
    """Where an alias points, by columns that are NULL unless it is split."""
    return AliasTarget(number, newer, percent or 0)


def _summary_of(row: AnyRow) -> AdapterSummary:
    return AdapterSummary(
        **_content_of(row), tenant=row.tenant, name=row.name, created_at=row.created_at, deleted_at=row.deleted_at
    )


def _content_of(row: AnyRow) -> dict[str, Any]:
    """The fields of `RevisionContent`."""
    content = {each.name: row._mapping[each.name] for each in fields(RevisionContent)}
    return content | {"kinds": tuple(row.kinds.split(","))}
