"""Remove unneeded content from the catalog, in two steps around the removal of its bytes.

    1. `collect` deletes the rows and inserts each content id into `removals`, in one transaction.
    2. The caller removes the bytes from the store.
    3. `confirm` writes into `removals` the sequence at which the bytes were gone.

An importer reads `last_change()` before it stores the bytes, and passes that number to `add_revision`. While the
content has its row, its bytes are stored, and a later collection sees the new reference. Otherwise `removals` decides:

    not confirmed               bytes that the importer found in the store can vanish at any moment: refused
    confirmed after the number  they may have vanished since it found them: refused, it stores them again
    confirmed before            it has seen the store without them and has written them itself: accepted

Bytes without a row are removed in the same way, with `condemn` as the first step, because an import may be about to add
their row. A memory-only row counts as none: `removals` may have its id, and decides about the import that stores its
bytes.

If a caller dies between the steps, the next `collect` returns the same ids. Only one caller runs at a time
(`locks.py`): another one, still removing bytes of ids that this one has confirmed, would remove those of a new
import.
"""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, delete, exists, func, insert, select, update

from adapters.catalog.sql.database import Database, Transaction
from adapters.catalog.sql.tables import (
    adapter_revisions,
    adapters,
    alias_moves,
    alias_splits,
    aliases,
    batches,
    grants,
    removals,
    revisions,
)

_ADAPTERS = 500  # per transaction, so that other writers get their turn


def collect(database: Database, older_than: datetime) -> list[str]:
    """Purge the adapters deleted before `older_than`; return the ids of all content whose bytes can be removed."""
    while database.write(lambda transaction: _purge(transaction, older_than)):
        pass
    waiting = select(removals.c.revision_id).where(removals.c.removed_sequence.is_(None))
    return database.read(lambda connection: list(connection.execute(waiting.order_by("revision_id")).scalars()))


def condemn(transaction: Transaction, revision_id: str) -> bool:
    """Announce the removal of bytes that no row needs; False if one needs them by now."""
    connection = transaction.connection
    needed = select(revisions.c.id).where(revisions.c.revision_id == revision_id, revisions.c.stored)
    if connection.execute(needed).first() is not None:
        return False
    connection.execute(delete(removals).where(removals.c.revision_id == revision_id))
    connection.execute(insert(removals), {"revision_id": revision_id, "condemned_at": transaction.now})
    return True


def confirm(transaction: Transaction, revision_ids: Sequence[str]) -> None:
    """Record that the bytes are gone, so that the content can be imported again."""
    sequence = transaction.change("removed")
    for batch in batches(revision_ids):
        transaction.connection.execute(
            update(removals)
            .where(removals.c.revision_id.in_(batch), removals.c.removed_sequence.is_(None))
            .values(removed_sequence=sequence)
        )


def _purge(transaction: Transaction, older_than: datetime) -> bool:
    """Purge batch adapters; True if there may be more."""
    connection = transaction.connection
    purgeable = (
        select(adapters.c.id)
        .where(adapters.c.deleted_at < older_than, adapters.c.purged_at.is_(None))
        .order_by(adapters.c.deleted_at)
        .limit(_ADAPTERS)
    )
    ids = list(connection.execute(purgeable).scalars())
    if not ids:
        return False
    purge(transaction, ids)
    return len(ids) == _ADAPTERS


def purge(transaction: Transaction, ids: Sequence[int]) -> None:
    """Remove all that adapters have. Their rows stay."""
    connection = transaction.connection
    owned = select(adapter_revisions.c.content_id).distinct().where(adapter_revisions.c.adapter_id.in_(ids))
    contents = list(connection.execute(owned).scalars())
    for table in (aliases, alias_moves, alias_splits, adapter_revisions):
        connection.execute(delete(table).where(table.c.adapter_id.in_(ids)))
    condemn_unneeded(connection, contents, transaction.now)
    remove_grants(transaction, ids)
    deleted_at = func.coalesce(adapters.c.deleted_at, transaction.now)
    gone = update(adapters).where(adapters.c.id.in_(ids))
    connection.execute(gone.values(deleted_at=deleted_at, purged_at=transaction.now))
    for adapter_id in ids:
        transaction.change("purge", adapter_id)


def remove_grants(transaction: Transaction, adapter_ids: Sequence[int]) -> None:
    """Remove the grants for these adapters, so that a later adapter of their name has none. Those for all stay."""
    of_these = exists().where(
        adapters.c.id.in_(adapter_ids), adapters.c.tenant == grants.c.owner, adapters.c.name == grants.c.name
    )
    if transaction.connection.execute(delete(grants).where(of_these)).rowcount:
        transaction.change("grants")


def condemn_unneeded(
    connection: Connection, contents: Sequence[int], now: datetime, *, unstored_too: bool = False
) -> list[str]:
    """Announce the removal of those contents that no adapter has any more; return their revision ids.

    `unstored_too` notes memory-only content among the removals as well.
    """
    found: list[str] = []
    for batch in batches(contents):
        unneeded = connection.execute(
            select(revisions.c.id, revisions.c.revision_id, revisions.c.stored).where(
                revisions.c.id.in_(batch), ~exists().where(adapter_revisions.c.content_id == revisions.c.id)
            )
        ).all()
        noted = [row.revision_id for row in unneeded if row.stored or unstored_too]
        removed = [{"revision_id": each, "condemned_at": now} for each in noted]
        if removed:
            # Of memory-only content that was stored before, the store's removal is noted already.
            connection.execute(delete(removals).where(removals.c.revision_id.in_(noted)))
            connection.execute(insert(removals), removed)
        if unneeded:
            connection.execute(delete(revisions).where(revisions.c.id.in_([row.id for row in unneeded])))
        found += [row.revision_id for row in unneeded]
    return found
