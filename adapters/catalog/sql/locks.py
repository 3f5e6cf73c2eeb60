"""Locks between processes: PostgreSQL's advisory locks, and the exclusive right to collect garbage.

Advisory locks belong to a transaction: they work through poolers and end with their process, however it ends.
On SQLite, whose processes share one machine, the right to collect is a lock on a file beside the database.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum, unique
from pathlib import Path

from sqlalchemy import Connection, Engine, text

from adapters.errors import CatalogConflict, CatalogUnavailable

# The limit for one removal from the store. If a collector hangs longer, another can take over.
_MOST_IDLE_S = 600

StillHeld = Callable[[], None]  # raises when the right has been lost


@unique
class AdvisoryLock(IntEnum):
    """All of Prelude's advisory locks in a database. Their keys begin with "Prelud"."""

    MIGRATE = 0x5072656C75646501  # one process migrates, the others wait
    COLLECT = 0x5072656C75646502
    LEASE = 0x5072656C75646503  # routers ask for quotas one at a time


def take(connection: Connection, lock: AdvisoryLock) -> None:
    """Wait for a lock, held to the transaction's end. Does nothing on SQLite: it has one writer.

    Call it only in transactions that no catalog change and no other thread waits for.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": lock.value})


def collecting(engine: Engine) -> AbstractContextManager[StillHeld]:
    """Hold the right to collect garbage. Raises CatalogConflict if another process holds it."""
    if engine.dialect.name == "postgresql":
        return _of_postgres(engine)
    return _of_sqlite(Path(engine.url.database or ""))


@contextmanager
def _of_postgres(engine: Engine) -> Iterator[StillHeld]:
    with engine.connect() as connection, connection.begin():
        connection.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = '{_MOST_IDLE_S}s'"))
        if not connection.execute(
            text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": AdvisoryLock.COLLECT.value}
        ).scalar_one():
            raise _taken()
        yield lambda: connection.execute(text("SELECT 1")).close()


@contextmanager
def _of_sqlite(database: Path) -> Iterator[StillHeld]:
    lock = database.with_name(f"{database.name}-collector")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CatalogUnavailable(
            f"{lock} cannot be opened ({error.strerror}); the folder of the catalog must be writeable"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken() from None
        yield lambda: None
    finally:
        os.close(descriptor)


def _taken() -> CatalogConflict:
    return CatalogConflict("another garbage collection or a backup of this catalog runs; try again when it has ended")
