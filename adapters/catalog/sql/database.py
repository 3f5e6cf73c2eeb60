"""The catalog's database: reads, write transactions, and waiting for changes.

One transaction writes at a time: on SQLite by `BEGIN IMMEDIATE`, on PostgreSQL by a lock on the one row of
`change_counter`. So changes are numbered in the order of their commits, a reader that knows all up to n misses none,
and writers never conflict.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TypeVar

from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from adapters.catalog.records import ChangeKind
from adapters.catalog.sql.drivers import (
    LOCK_TIMEOUT_S,
    POOL_TIMEOUT_S,
    is_contended,
    is_lost_connection,
    is_unreachable,
    is_without_tables,
    parse_url,
    postgres_engine,
    sqlite_engine,
)
from adapters.catalog.sql.locks import StillHeld, collecting
from adapters.catalog.sql.tables import UtcTime, change_counter, changes
from adapters.errors import CatalogUnavailable

T = TypeVar("T")

_ATTEMPTS = 6
_BACKOFF_S = 0.02  # upper bound before the second attempt; doubled for each further one
KEPT_CHANGES = 100_000  # a reader that is further behind starts over
_TRIM_EVERY = 1000  # changes
_MOST_TRIMMED = 10_000  # by one transaction


class Transaction:
    """A write transaction, the only one on this database."""

    def __init__(self, connection: Connection, last: int, now: datetime):
        self.connection = connection
        self.now = now
        self._first = self._last = last

    def change(self, kind: ChangeKind, adapter_id: int | None = None) -> int:
        """Record a change, visible with the commit; return its sequence."""
        self._last += 1
        self.connection.execute(
            insert(changes),
            {"sequence": self._last, "kind": kind, "adapter_id": adapter_id, "changed_at": self.now},
        )
        return self._last

    def finish(self) -> None:
        """Execute the last statements before the commit."""
        if self._last == self._first:
            return
        self.connection.execute(update(change_counter).values(last=self._last))
        if self._last // _TRIM_EVERY != self._first // _TRIM_EVERY:
            self._trim()

    def _trim(self) -> None:
        oldest = self.connection.execute(select(func.min(changes.c.sequence))).scalar_one()
        beyond = min(self._last - KEPT_CHANGES, oldest - 1 + _MOST_TRIMMED)
        self.connection.execute(delete(changes).where(changes.c.sequence <= beyond))


class Database:
    """Connections to one database, for any number of threads. Every method can raise CatalogUnavailable."""

    def __init__(self, url: str):
        parsed = parse_url(url)
        self._shown = parsed.render_as_string(hide_password=True)
        self._is_postgres = parsed.get_backend_name() == "postgresql"
        # Each read is one statement in its own transaction, on SQLite too, as long as none is begun.
        self._reads = (postgres_engine if self._is_postgres else sqlite_engine)(parsed)
        self._writes = self._reads.execution_options(prelude_writes=True)
        if self._is_postgres:  # a writer that waited for another one must see what that one committed
            self._writes = self._writes.execution_options(isolation_level="READ COMMITTED")
        self._check: Callable[[Transaction], None] | None = None  # begins each write, and may raise
        # Waiting for SQLite's lock, threads would poll and starve; for PostgreSQL's, each would hold a connection.
        self._writer = threading.Lock()

    def close(self) -> None:
        """Close idle connections. A later call opens new ones."""
        self._reads.dispose()

    def read(self, query: Callable[[Connection], T]) -> T:
        """Run a query; once more if the pool's connection turns out to be dead."""
        with self._translated():
            try:
                with self._reads.connect() as connection:
                    return query(connection)
            except DBAPIError as error:
                if not is_lost_connection(error):
                    raise
            with self._reads.connect() as connection:
                return query(connection)

    def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a write transaction, and again from the start after contention."""

        def in_turn(connection: Connection) -> T:
            if self._is_postgres:
                last, now = connection.execute(select(change_counter.c.last, _SERVER_TIME).with_for_update()).one()
            else:
                last, now = connection.execute(_LAST_CHANGE).scalar_one(), datetime.now(UTC)
            transaction = Transaction(connection, last, now)
            if self._check is not None:
                self._check(transaction)
            result = work(transaction)
            transaction.finish()
            return result

        return self._as_writer(in_turn)

    def transact(self, work: Callable[[Connection], T]) -> T:
        """As `write`, for work that is no change of the catalog, such as migrations.

        On PostgreSQL it neither waits for this process's writers nor holds them up, whatever locks it waits for.
        """
        if not self._is_postgres:
            return self._as_writer(work)
        with self._translated():
            return self._attempts(work)

    def _as_writer(self, work: Callable[[Connection], T]) -> T:
        if not self._writer.acquire(timeout=POOL_TIMEOUT_S):
            raise CatalogUnavailable(
                f"{POOL_TIMEOUT_S} s were not enough for the writers in line before this one; try again"
            )
        try:
            with self._translated():
                return self._attempts(work)
        finally:
            self._writer.release()

    @contextmanager
    def collecting(self) -> Iterator[StillHeld]:
        """Hold the exclusive right to collect garbage, and a connection.

        Call the function that it yields before each removal: it raises CatalogUnavailable once the right has been lost.
        Raises CatalogConflict if another process holds the right.
        """
        with self._translated(), collecting(self._writes) as still_held:
            yield still_held

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A connection whose reads all see the database at the instant of the first one. Writers do not wait for it."""
        level = {"isolation_level": "REPEATABLE READ"} if self._is_postgres else {}
        reads = self._reads.execution_options(**level)
        with self._translated(), reads.connect() as connection, connection.begin():
            if not self._is_postgres:
                connection.exec_driver_sql("BEGIN")
            yield connection

    def now(self) -> datetime:
        """The time by the clock that dates all changes, by which to count the age of deletions.

        It is the server's for PostgreSQL, this machine's for SQLite.
        """
        if not self._is_postgres:
            return datetime.now(UTC)
        return self.read(lambda connection: connection.execute(select(_SERVER_TIME)).scalar_one())

    def last_change(self) -> int:
        """The sequence of the newest change; 0 before the first."""
        return self.read(lambda connection: connection.execute(_LAST_CHANGE).scalar_one())

    def _attempts(self, work: Callable[[Connection], T]) -> T:
        started = time.monotonic()
        for attempt in range(_ATTEMPTS):
            committing = False
            try:
                with self._writes.connect() as connection, connection.begin() as begun:
                    result = work(connection)
                    committing = True
                    begun.commit()
                    return result
            except DBAPIError as error:
                lost = is_lost_connection(error)
                if lost and committing:
                    raise CatalogUnavailable(
                        f"the connection to {self._shown} broke during a commit: whether the change was made is not "
                        "known; look before making it again"
                    ) from error
                # A pooled connection may have been dead for long; by now the pool has dropped them all.
                in_time = attempt + 1 < _ATTEMPTS and time.monotonic() - started < LOCK_TIMEOUT_S
                if not (lost and attempt == 0) and not (is_contended(error) and in_time):
                    raise
            time.sleep(random.uniform(0, _BACKOFF_S * 2**attempt))
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, PoolTimeout) as error:
            if is_without_tables(error):
                raise CatalogUnavailable(
                    f"the database {self._shown} has none of the catalog's tables; migrate it, or correct the URL"
                ) from error
            if not is_unreachable(error):
                raise
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> CatalogUnavailable:
        lines = str(error.orig if isinstance(error, DBAPIError) else error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        remedy = "see that it runs and can be reached"
        if not self._is_postgres:
            remedy = f"see that user {os.getuid()} may write to its folder, that the disk has room and nobody locks it"
        return CatalogUnavailable(f"the catalog's database {self._shown} does not answer ({reason}); {remedy}")


class CatalogPart:
    """Rows of one kind."""

    def __init__(self, database: Database) -> None:
        self._database = database


_LAST_CHANGE = select(change_counter.c.last)
_SERVER_TIME = func.clock_timestamp(type_=UtcTime())  # one clock for all machines, of which some may be wrong
