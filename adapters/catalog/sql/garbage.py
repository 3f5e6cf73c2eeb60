"""Takes content out of the catalog that no adapter needs any more, in two steps around the removal of its bytes.

    1. `collect` takes the rows out and leaves a row in `removals` for each content id, in one transaction.
    2. The caller removes the bytes from the store.
    3. `confirm` writes into `removals` the sequence by which the bytes were gone.

An importer reads `last_change()` before it stores the bytes, and `add_revision` gets that number. While the content
has its row its bytes are there too, and a later collection sees the new reference. Otherwise `removals` decides:

    not confirmed               bytes that the importer found in the store may go any moment: refused
    confirmed after the number  they may have gone since it found them: refused, it stores them again
    confirmed before            it has seen the store without them and has written them itself: accepted

Bytes without a row go the same way, with `condemn` as the first step: an import may be about to give them one. To the
store, a row of content that is not `stored` is no row: `removals` may have its id, and decides over the import that
brings its bytes.

A caller that dies between the steps gets the same ids from its next `collect`. One caller at a time (`collector.py`):
another that still removes bytes of ids that this one has confirmed would remove those of a new import.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from sqlalchemy import Connection, delete, exists, insert, select, update

from adapters.catalog.sql.database import Database, Transaction
from adapters.catalog.sql.tables import adapter_revisions, adapters, alias_moves, aliases, removals, revisions

_ADAPTERS = 500  # of one transaction, so that other writers get their turn
_IDS = 1000  # of one statement


def collect(database: Database, older_than: datetime) -> list[str]:
    """Purges the adapters deleted before `older_than`; the ids of all content whose bytes may go."""
    while database.write(lambda transaction: _purge(transaction, older_than)):
        pass
    waiting = select(removals.c.revision_id).where(removals.c.removed_sequence.is_(None))
    return database.read(lambda connection: list(connection.execute(waiting.order_by("revision_id")).scalars()))


def condemn(transaction: Transaction, revision_id: str) -> bool:
    """Announces that bytes which no row needs are about to go; False where a row has come that needs them."""
    connection = transaction.connection
    needed = select(revisions.c.id).where(revisions.c.revision_id == revision_id, revisions.c.stored)
    if connection.execute(needed).first() is not None:
        return False
    connection.execute(delete(removals).where(removals.c.revision_id == revision_id))
    connection.execute(insert(removals), {"revision_id": revision_id, "condemned_at": transaction.now})
    return True


def confirm(transaction: Transaction, revision_ids: Sequence[str]) -> None:
    """Says that the bytes are gone, so that the content may be imported again."""
    sequence = transaction.change("removed")
    for some in _slices(revision_ids):
        transaction.connection.execute(
            update(removals)
            .where(removals.c.revision_id.in_(some), removals.c.removed_sequence.is_(None))
            .values(removed_sequence=sequence)
        )


def _purge(transaction: Transaction, older_than: datetime) -> bool:
    """Purges some adapters; True if there can be more."""
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
    owned = select(adapter_revisions.c.content_id).distinct().where(adapter_revisions.c.adapter_id.in_(ids))
    contents = list(connection.execute(owned).scalars())
    for table in (aliases, alias_moves, adapter_revisions):
        connection.execute(delete(table).where(table.c.adapter_id.in_(ids)))
    for some in _slices(contents):
        _condemn(connection, some, transaction.now)
    connection.execute(update(adapters).where(adapters.c.id.in_(ids)).values(purged_at=transaction.now))
    for adapter_id in ids:
        transaction.change("purge", adapter_id)
    return len(ids) == _ADAPTERS


def _condemn(connection: Connection, contents: Sequence[int], now: datetime) -> None:
    unneeded = connection.execute(
        select(revisions.c.id, revisions.c.revision_id, revisions.c.stored).where(
            revisions.c.id.in_(contents), ~exists().where(adapter_revisions.c.content_id == revisions.c.id)
        )
    ).all()
    if not unneeded:
        return
    removed = [{"revision_id": row.revision_id, "condemned_at": now} for row in unneeded if row.stored]
    if removed:
        connection.execute(insert(removals), removed)
    connection.execute(delete(revisions).where(revisions.c.id.in_([row.id for row in unneeded])))


def _slices(values: Sequence[str] | Sequence[int]) -> Iterator[Sequence]:
    for start in range(0, len(values), _IDS):
        yield values[start : start + _IDS]
