"""The catalog's write operations, each within one write transaction."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, delete, exists, func, insert, or_, select, update

from adapters.catalog.records import AdapterRevision, AliasMove, AliasTarget
from adapters.catalog.sql.database import Transaction
from adapters.catalog.sql.garbage import condemn_unneeded, purge, remove_grants
from adapters.catalog.sql.listing import MOVES, move_of, target_of
from adapters.catalog.sql.lookup import find_adapter, find_revision, not_found, require_adapter
from adapters.catalog.sql.tables import (
    IS_SPLIT,
    AnyRow,
    adapter_revisions,
    adapters,
    alias_moves,
    alias_splits,
    aliases,
    manifests,
    removals,
    revisions,
)
from adapters.catalog.sql.tenants import CatalogQuota, check_quota, ensure_tenant
from adapters.errors import CatalogConflict, InvalidReference, RevisionBeingRemoved
from adapters.identity import LATEST, AdapterReference, full_name_of
from adapters.model.manifest import Manifest

MAX_ALIASES = 1000  # of one adapter
KEPT_MOVES = 1000  # of one alias
_TRIM_AT = KEPT_MOVES + 100
_MOST_TRIMMED = 10_000  # by one transaction


def add_revision(
    transaction: Transaction,
    tenant: str,
    name: str,
    manifest: Manifest,
    revision_id: str,
    num_bytes: int,
    warnings: Sequence[str],
    stored_since: int | None,
    by: str | None,
    moves_latest: bool,
    alias: str | None,
    quota: CatalogQuota | None,
) -> AdapterRevision:
    """See `SqlCatalog.add_revision`."""
    connection = transaction.connection
    content_id = _content(transaction, manifest, revision_id, num_bytes, stored_since)
    adapter_id = _adapter(transaction, tenant, name)
    number = connection.execute(
        select(adapter_revisions.c.number).where(
            adapter_revisions.c.adapter_id == adapter_id, adapter_revisions.c.content_id == content_id
        )
    ).scalar()
    if number is None:
        number = connection.execute(
            update(adapters)
            .where(adapters.c.id == adapter_id)
            .values(last_number=adapters.c.last_number + 1)
            .returning(adapters.c.last_number)
        ).scalar_one()
        connection.execute(
            insert(adapter_revisions),
            {
                "adapter_id": adapter_id,
                "number": number,
                "content_id": content_id,
                "created_at": transaction.now,
                "warnings": "\n".join(" ".join(each.split()) for each in warnings),
            },
        )
        if quota is not None:
            check_quota(connection, tenant, quota)
        sequence: int | None = transaction.change("import", adapter_id)
        is_new = _alias(transaction, adapter_id, LATEST) is None
    else:
        sequence, is_new = None, False
    moved = set() if alias is None else {alias}
    if moves_latest or is_new:
        moved.add(LATEST)
    target = AliasTarget(number)
    for each in sorted(moved):
        at = _alias(transaction, adapter_id, each)
        if at is None or at.target != target:
            sequence = sequence or transaction.change("alias", adapter_id)
            _place(transaction, adapter_id, each, at, target, by, sequence, before=None if at is None else at.move)
    added = find_revision(connection, AdapterReference(tenant, name, alias=None, number=number))
    assert added is not None
    return added


def set_alias(
    transaction: Transaction,
    tenant: str,
    name: str,
    alias: str,
    target: AliasTarget,
    expected: AliasTarget | None,
    by: str | None,
) -> AliasMove:
    """See `SqlCatalog.set_alias`. `expected`: with the number 0 for no alias."""
    if target.newer is not None and alias == LATEST:  # lists show one revision, and each import would end the split
        raise InvalidReference(f"the alias {LATEST!r} cannot be split, as imports move it; split another alias")
    for number in (target.number, target.newer):
        wanted = AdapterReference(tenant, name, alias=None, number=number)
        if number is not None and find_revision(transaction.connection, wanted) is None:
            raise not_found(transaction.connection, wanted)
    adapter_id = require_adapter(transaction.connection, tenant, name)
    at = _alias(transaction, adapter_id, alias)
    found = AliasTarget(0) if at is None else at.target
    if expected is not None and expected != found:
        where = f"is at {found}" if found.number else "does not exist"
        meant = f"at {expected}" if expected.number else "new"
        raise CatalogConflict(
            f"the alias {alias!r} of {full_name_of(tenant, name)!r} {where} and is not {meant}, as the change expects; "
            "look at it again"
        )
    if at is not None and at.target == target:
        return move_of(_move_row(transaction, adapter_id, alias, at.move))
    sequence = transaction.change("alias", adapter_id)
    return _place(transaction, adapter_id, alias, at, target, by, sequence, before=None if at is None else at.move)


def roll_back(transaction: Transaction, tenant: str, name: str, alias: str, by: str | None) -> AliasMove:
    """See `SqlCatalog.rollback`."""
    adapter_id = require_adapter(transaction.connection, tenant, name)
    at = _alias(transaction, adapter_id, alias)
    if at is None:
        raise not_found(transaction.connection, AdapterReference(tenant, name, alias=alias))
    before = _move_row(transaction, adapter_id, alias, at.move).before
    if before is None:
        raise CatalogConflict(
            f"the alias {alias!r} of {full_name_of(tenant, name)!r} has no revision before {at.target}; point it "
            "at a revision by its number"
        )
    earlier = _move_row(transaction, adapter_id, alias, before)
    sequence, target = transaction.change("alias", adapter_id), move_of(earlier).target
    return _place(transaction, adapter_id, alias, at, target, by, sequence, before=earlier.before)


def remove_alias(transaction: Transaction, tenant: str, name: str, alias: str) -> str | None:
    """See `SqlCatalog.remove_alias`."""
    connection = transaction.connection
    adapter_id = require_adapter(connection, tenant, name)
    if (at := _alias(transaction, adapter_id, alias)) is None:
        raise not_found(connection, AdapterReference(tenant, name, alias=alias))
    if at.target.newer is not None:
        raise CatalogConflict(
            f"the alias {alias!r} of {full_name_of(tenant, name)!r} is split ({at.target}); point it at one revision, "
            "then remove it"
        )
    number = at.target.number
    sequence = transaction.change("alias", adapter_id)
    latest = _alias(transaction, adapter_id, LATEST)
    assert latest is not None
    for table in (aliases, alias_moves, alias_splits):
        connection.execute(delete(table).where(table.c.adapter_id == adapter_id, table.c.alias == alias))
    own = adapter_revisions.c.adapter_id == adapter_id
    content = select(revisions.c.id, revisions.c.revision_id, revisions.c.stored).join(adapter_revisions)
    row = connection.execute(content.where(own, adapter_revisions.c.number == number)).one()
    if row.stored:
        return None
    at_it = (
        select(aliases.c.alias)
        .outerjoin(alias_splits, IS_SPLIT)
        .where(aliases.c.adapter_id == adapter_id, or_(aliases.c.number == number, alias_splits.c.newer == number))
    )
    if latest.move == at.move:  # the push that made the alias has put it there
        if (other := _other_place(transaction, adapter_id, number)) is None:
            purge(transaction, [adapter_id])
            return row.revision_id
        place = {"to_number": other.number, "sequence": other.move or sequence}
        moved = update(alias_moves).where(alias_moves.c.adapter_id == adapter_id, alias_moves.c.alias == LATEST)
        connection.execute(moved.where(alias_moves.c.sequence == at.move).values(place))
        its = update(aliases).where(aliases.c.adapter_id == adapter_id, aliases.c.alias == LATEST)
        connection.execute(its.values(number=other.number, move=place["sequence"]))
    if connection.execute(at_it).first() is not None:
        return None
    moves = alias_moves.c.adapter_id == adapter_id
    to_it = MOVES.where(moves, or_(alias_moves.c.to_number == number, alias_splits.c.newer == number))
    for move in connection.execute(to_it).all():
        for table in (alias_moves, alias_splits):
            of_alias = (table.c.adapter_id == adapter_id) & (table.c.alias == move.alias)
            connection.execute(delete(table).where(of_alias, table.c.sequence == move.sequence))
    _end_at_gaps(transaction, moves)
    connection.execute(delete(adapter_revisions).where(own, adapter_revisions.c.number == number))
    condemn_unneeded(connection, [row.id], transaction.now)
    return row.revision_id


def delete_adapter(transaction: Transaction, tenant: str, name: str) -> None:
    """See `SqlCatalog.delete`."""
    adapter_id = require_adapter(transaction.connection, tenant, name)
    transaction.connection.execute(
        update(adapters).where(adapters.c.id == adapter_id).values(deleted_at=transaction.now)
    )
    transaction.change("delete", adapter_id)


def restore_adapter(transaction: Transaction, tenant: str, name: str) -> None:
    """See `SqlCatalog.restore`."""
    row = find_adapter(transaction.connection, tenant, name)
    if row is None or row.purged_at is not None:
        raise not_found(transaction.connection, AdapterReference(tenant, name))
    if row.deleted_at is None:
        return
    transaction.connection.execute(update(adapters).where(adapters.c.id == row.id).values(deleted_at=None))
    transaction.change("restore", row.id)


def _content(
    transaction: Transaction, manifest: Manifest, revision_id: str, num_bytes: int, stored_since: int | None
) -> int:
    connection = transaction.connection
    known = connection.execute(
        select(revisions.c.id, revisions.c.stored).where(revisions.c.revision_id == revision_id)
    ).first()
    if known is not None and (known.stored or stored_since is None):
        return known.id  # stored content stays stored
    if stored_since is not None:
        _check_bytes_stay(transaction, revision_id, stored_since)
    if known is not None:
        _mark_stored(transaction, known.id)
        return known.id
    return connection.execute(
        insert(revisions).returning(revisions.c.id),
        {
            "revision_id": revision_id,
            "manifest_id": _manifest(transaction, manifest),
            "kinds": ",".join(manifest.kinds),
            "positions": manifest.positions,
            "trained_positions": manifest.trained_positions,
            "base_model": manifest.base_model,
            "bytes": num_bytes,
            "created_at": transaction.now,
            "stored": stored_since is not None,
        },
    ).scalar_one()


def _check_bytes_stay(transaction: Transaction, revision_id: str, stored_since: int) -> None:
    """Raise RevisionBeingRemoved if bytes stored since that change may be gone (see `garbage.py`)."""
    connection = transaction.connection
    removal = connection.execute(select(removals).where(removals.c.revision_id == revision_id)).first()
    if removal is None:
        return
    if removal.removed_sequence is None or removal.removed_sequence > stored_since:
        raise RevisionBeingRemoved(
            f"{revision_id} was collected as garbage while it was being imported; its bytes must be stored again: "
            "repeat the import"
        )
    connection.execute(delete(removals).where(removals.c.revision_id == revision_id))


def _mark_stored(transaction: Transaction, content_id: int) -> None:
    """Mark memory-only content as stored, and record a change for every adapter that has it."""
    connection = transaction.connection
    connection.execute(update(revisions).where(revisions.c.id == content_id).values(stored=True))
    having = select(adapter_revisions.c.adapter_id).where(adapter_revisions.c.content_id == content_id)
    for adapter_id in connection.execute(having.order_by(adapter_revisions.c.adapter_id)).scalars().all():
        transaction.change("stored", adapter_id)


def _manifest(transaction: Transaction, manifest: Manifest) -> int:
    json = manifest.to_json()
    digest = hashlib.sha256(json.encode()).hexdigest()
    known = transaction.connection.execute(select(manifests.c.id).where(manifests.c.digest == digest)).scalar()
    if known is not None:
        return known
    return transaction.connection.execute(
        insert(manifests).returning(manifests.c.id), {"digest": digest, "json": json}
    ).scalar_one()


def _adapter(transaction: Transaction, tenant: str, name: str) -> int:
    connection = transaction.connection
    row = find_adapter(connection, tenant, name)
    if row is not None:
        if row.deleted_at is not None and row.purged_at is None:
            # Its aliases would come back, too, which may not be wanted.
            raise CatalogConflict(
                f"the adapter {full_name_of(tenant, name)!r} was deleted on {row.deleted_at:%Y-%m-%d %H:%M} UTC and is "
                "still kept; restore it first, or choose another name"
            )
        if row.deleted_at is not None:  # a new adapter, but for its numbers
            anew = {"created_at": transaction.now, "deleted_at": None, "purged_at": None, "shares_prefixes": False}
            connection.execute(update(adapters).where(adapters.c.id == row.id).values(anew))
            remove_grants(transaction, [row.id])  # left by a version whose purge left them
        return row.id
    ensure_tenant(transaction, tenant)
    return connection.execute(
        insert(adapters).returning(adapters.c.id),
        {"tenant": tenant, "name": name, "last_number": 0, "created_at": transaction.now},
    ).scalar_one()


@dataclass(frozen=True, slots=True)
class _At:
    target: AliasTarget
    move: int  # the sequence of the move that put it there


def _alias(transaction: Transaction, adapter_id: int, alias: str) -> _At | None:
    row = transaction.connection.execute(
        select(aliases.c.number, aliases.c.move, alias_splits.c.newer, alias_splits.c.percent)
        .outerjoin(alias_splits, IS_SPLIT)
        .where(aliases.c.adapter_id == adapter_id, aliases.c.alias == alias)
    ).first()
    return None if row is None else _At(target_of(row.number, row.newer, row.percent), row.move)


def _other_place(transaction: Transaction, adapter_id: int, number: int) -> AnyRow | None:
    """Where `latest` may be once an alias at this number is gone, and the move of an alias there, which it joins."""
    revision, there = adapter_revisions.c, aliases.c
    is_there = (there.adapter_id == adapter_id) & (there.number == revision.number) & (there.alias != LATEST)
    found = select(revision.number, there.move).join(revisions).outerjoin(aliases, is_there)
    found = found.where(revision.adapter_id == adapter_id, or_(revision.number != number, there.move.is_not(None)))
    best = (revision.number == number).desc(), revisions.c.stored.desc(), revision.number.desc()
    return transaction.connection.execute(found.order_by(*best).limit(1)).first()


def _move_row(transaction: Transaction, adapter_id: int, alias: str, sequence: int) -> AnyRow:
    """A move, and the one `before` it that a rollback returns to."""
    own = (alias_moves.c.adapter_id == adapter_id) & (alias_moves.c.alias == alias)
    return transaction.connection.execute(MOVES.where(own, alias_moves.c.sequence == sequence)).one()


def _check_num_aliases(transaction: Transaction, adapter_id: int) -> None:
    """Raise CatalogConflict: whoever may change an adapter could give it any number, which every page of it shows."""
    num = transaction.connection.execute(
        select(func.count()).select_from(aliases).where(aliases.c.adapter_id == adapter_id)
    ).scalar_one()
    if num >= MAX_ALIASES:
        raise CatalogConflict(
            f"the adapter has {num} aliases, which is the most; move one of them, or use the numbers of revisions"
        )


def _place(
    transaction: Transaction,
    adapter_id: int,
    alias: str,
    at: _At | None,
    target: AliasTarget,
    by: str | None,
    sequence: int,
    before: int | None,
) -> AliasMove:
    """Move an alias from where it is `at`; None: it is new."""
    connection, number = transaction.connection, target.number
    connection.execute(
        insert(alias_moves),
        {
            "adapter_id": adapter_id,
            "alias": alias,
            "sequence": sequence,
            "from_number": None if at is None else at.target.number,
            "to_number": number,
            "before": before,
            "moved_at": transaction.now,
            "moved_by": by,
        },
    )
    origin = target if at is None else at.target
    if origin.newer is not None or target.newer is not None:
        shares = {"from_newer": origin.newer, "from_percent": origin.percent}
        shares |= {"newer": target.newer, "percent": target.percent}
        of_move = {"adapter_id": adapter_id, "alias": alias, "sequence": sequence}
        connection.execute(insert(alias_splits), of_move | shares)
    if at is None:
        _check_num_aliases(transaction, adapter_id)
        connection.execute(
            insert(aliases), {"adapter_id": adapter_id, "alias": alias, "number": number, "move": sequence}
        )
    else:
        connection.execute(
            update(aliases)
            .where(aliases.c.adapter_id == adapter_id, aliases.c.alias == alias)
            .values(number=number, move=sequence)
        )
        _trim_moves(transaction, adapter_id, alias)
    return move_of(_move_row(transaction, adapter_id, alias, sequence))


def _trim_moves(transaction: Transaction, adapter_id: int, alias: str) -> None:
    """Delete an alias's oldest moves once there are many. Rollbacks go back no further."""
    connection, own = transaction.connection, (alias_moves.c.adapter_id == adapter_id) & (alias_moves.c.alias == alias)
    if connection.execute(select(func.count()).select_from(alias_moves).where(own)).scalar_one() <= _TRIM_AT:
        return
    sequences = select(alias_moves.c.sequence).where(own).order_by(alias_moves.c.sequence.desc())
    kept_since = connection.execute(sequences.offset(KEPT_MOVES - 1).limit(1)).scalar_one()
    old = own & (alias_moves.c.sequence < kept_since)
    oldest = select(alias_moves.c.sequence).where(old).order_by(alias_moves.c.sequence).limit(_MOST_TRIMMED)
    connection.execute(delete(alias_moves).where(own, alias_moves.c.sequence.in_(oldest.scalar_subquery())))
    splits = (alias_splits.c.adapter_id == adapter_id) & (alias_splits.c.alias == alias)
    connection.execute(delete(alias_splits).where(splits, alias_splits.c.sequence < kept_since))
    _end_at_gaps(transaction, own)


def _end_at_gaps(transaction: Transaction, moves: ColumnElement[bool]) -> None:
    """Rollbacks end where the move before is gone."""
    left = alias_moves.alias()
    is_gone = ~exists().where(
        left.c.adapter_id == alias_moves.c.adapter_id,
        left.c.alias == alias_moves.c.alias,
        left.c.sequence == alias_moves.c.before,
    )
    gone = update(alias_moves).where(moves, alias_moves.c.before.is_not(None), is_gone)
    transaction.connection.execute(gone.values(before=None))
