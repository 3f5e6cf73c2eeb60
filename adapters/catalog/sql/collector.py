"""The exclusive right to collect garbage. It ends with its process, however that ends.

On PostgreSQL it is an advisory lock of a transaction, which works through poolers, too. On SQLite, whose processes
share one machine, it is a lock on a file beside the database.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine, text

from adapters.errors import CatalogConflict, CatalogUnavailable

_LOCK = 0x5072656C75646502  # of PostgreSQL's advisory locks
# The limit for one removal from the store. If a collector hangs for longer, another one can take over.
_MOST_IDLE_S = 600

StillHeld = Callable[[], None]  # raises when the right has been lost


@contextmanager
def collecting(engine: Engine) -> Iterator[StillHeld]:
    """Hold the right. Raises CatalogConflict if another process holds it."""
    if engine.dialect.name == "postgresql":
        with _of_postgres(engine) as still_held:
            yield still_held
    else:
        with _of_sqlite(Path(engine.url.database or "")) as still_held:
            yield still_held


@contextmanager
def _of_postgres(engine: Engine) -> Iterator[StillHeld]:
    with engine.connect() as connection, connection.begin():
        connection.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = '{_MOST_IDLE_S}s'"))
        if not connection.execute(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": _LOCK}).scalar_one():
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
    return CatalogConflict("another garbage collection of this catalog is under way; wait for its end, then try again")
