"""Copies a catalog's rows from one database to another: SQLite or PostgreSQL, in either direction."""

from sqlalchemy import Connection, func, insert, select, text, update

from adapters.catalog.sql import tables
from adapters.errors import CatalogConflict

# `make_tables` has set the version. Whoever follows a catalog finds no changes in its copy, and starts over. Leases of
# quotas end with the routers that have them.
_LEFT_OUT = {tables.version, tables.change_counter, tables.changes}
_LEFT_OUT |= {tables.quota_members, tables.quota_pools, tables.quota_holdings}
_COPIED = [each for each in tables.metadata.sorted_tables if each not in _LEFT_OUT]  # after those that it refers to
_BATCH = 1000  # rows
_AHEAD = 1_000_000_000  # changes: nobody who followed the original is so far ahead that the copy's seem to be the next


def check_empty(connection: Connection) -> None:
    """Raises CatalogConflict if the catalog has any row that a copy would bring."""
    for table in _COPIED:
        if connection.execute(select(table).limit(1)).first() is not None:
            raise CatalogConflict(
                f"the catalog is not empty: {table.name} has rows. Stop routers, then name a new database in "
                "catalog.url, or drop this one"
            )


def copy_rows(source: Connection, target: Connection) -> None:
    """Fill the empty catalog `target`, within its transaction, with all rows that `source` sees.

    Its change counter goes far beyond the original's. Raises CatalogConflict if it is not empty.
    """
    is_postgres = target.dialect.name == "postgresql"
    if is_postgres:  # a router's audit event would take the id of one that is copied
        target.execute(text(f"LOCK TABLE {', '.join(table.name for table in _COPIED)} IN SHARE ROW EXCLUSIVE MODE"))
    check_empty(target)
    for table in _COPIED:
        rows = source.execution_options(yield_per=_BATCH).execute(select(table))
        for batch in rows.mappings().partitions():
            target.execute(insert(table), [dict(row) for row in batch])
        if is_postgres:  # it numbers the next rows; SQLite goes on from those that are there
            for column in (each for each in table.columns if each.identity is not None):
                sequence = func.pg_get_serial_sequence(table.name, column.name)
                target.execute(select(func.setval(sequence, select(func.max(column)).scalar_subquery())))
    last = source.execute(select(tables.change_counter.c.last)).scalar_one()
    target.execute(update(tables.change_counter).values(last=last + _AHEAD))
