"""SQLite and PostgreSQL: connections, configured for the catalog, and what errors mean."""

import sqlite3
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

LOCK_TIMEOUT_S = 5  # waiting for another process's writer
SQLITE_LOCK_TIMEOUT_S = 20  # SQLite has no queue: of many writers one can lose the race again and again
POOL_TIMEOUT_S = 10  # waiting for a connection that another thread uses
_CONNECT_TIMEOUT_S = 5
_MAX_CONNECTIONS = 20
_STATEMENT_TIMEOUT_S = 60
_IDLE_WRITER_TIMEOUT_S = 15  # a stalled writer blocks all others
_SQLITE_CONTENDED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_SQLITE_UNREACHABLE = _SQLITE_CONTENDED | {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}
_POSTGRES_CONTENDED = {
    "40001",  # serialization failure
    "40P01",  # deadlock
    "55P03",  # lock timeout
}
# Connection lost, resources exhausted, shut down or killed, I/O; a standby that was promoted elsewhere; a timeout.
_POSTGRES_UNREACHABLE_CLASSES = ("08", "53", "57", "58")
_POSTGRES_IDLE = "25P03"  # this process stood still inside a transaction for longer than the server allows
_POSTGRES_UNREACHABLE = _POSTGRES_CONTENDED | {"25006", _POSTGRES_IDLE, "25P04"}


def parse_url(url: str) -> URL:
    """Parse a catalog's URL and choose the driver. Raises ValueError with the rule."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ValueError(_URL_RULE.format("the given text")) from None  # it may hold a password
    backend = parsed.get_backend_name()
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return parsed.set(drivername="sqlite+pysqlite")
    raise ValueError(_URL_RULE.format(parsed.render_as_string(hide_password=True)))


_URL_RULE = "{} is not the URL of a catalog: it is sqlite:///FILE, or postgresql://USER:PASSWORD@HOST/DATABASE"


def postgres_engine(url: URL) -> Engine:
    """Connections to PostgreSQL in autocommit mode, for reads of one statement; every wait on the server is bounded.

    The mode is the pool's own, because setting and resetting it costs a read more time than the server needs.
    """
    engine = create_engine(
        url,
        isolation_level="AUTOCOMMIT",
        skip_autocommit_rollback=True,  # a returned connection has nothing to roll back
        pool_size=_MAX_CONNECTIONS,
        max_overflow=0,
        pool_timeout=POOL_TIMEOUT_S,
        connect_args={"connect_timeout": _CONNECT_TIMEOUT_S, "tcp_user_timeout": _CONNECT_TIMEOUT_S * 1000},
    )

    @event.listens_for(engine, "connect")
    def _set_limits(connection: Any, _record: Any) -> None:
        # As statements, because poolers refuse options of the connection.
        with connection.cursor() as cursor:
            cursor.execute(f"SET lock_timeout = '{LOCK_TIMEOUT_S}s'")
            cursor.execute(f"SET statement_timeout = '{_STATEMENT_TIMEOUT_S}s'")
            cursor.execute(f"SET idle_in_transaction_session_timeout = '{_IDLE_WRITER_TIMEOUT_S}s'")
        connection.commit()

    return engine


def sqlite_engine(url: URL) -> Engine:
    """Connections to a SQLite file; those with the execution option `prelude_writes` begin transactions."""
    engine = create_engine(
        url,
        pool_size=_MAX_CONNECTIONS,
        max_overflow=0,
        pool_timeout=POOL_TIMEOUT_S,
        connect_args={"timeout": SQLITE_LOCK_TIMEOUT_S, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # we begin transactions, not the driver before its first INSERT
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")  # a reported commit survives a power cut
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.get_execution_options().get("prelude_writes"):
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def is_contended(error: DBAPIError) -> bool:
    """True if the transaction failed because of others and can be retried. Nothing was committed."""
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        return _sqlite_code(cause) in _SQLITE_CONTENDED
    return isinstance(cause, psycopg.Error) and cause.sqlstate in _POSTGRES_CONTENDED


def is_lost_connection(error: DBAPIError) -> bool:
    """True if the connection broke, so that a new one may work."""
    is_ended_by_server = isinstance(error.orig, psycopg.Error) and error.orig.sqlstate == _POSTGRES_IDLE
    return error.connection_invalidated or is_ended_by_server  # the driver does not call the latter lost


def is_unreachable(error: DBAPIError | PoolTimeout) -> bool:
    """True if the database is down, full, read-only or overloaded, whatever our statement was."""
    if isinstance(error, PoolTimeout):
        return True
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        return _sqlite_code(cause) in _SQLITE_UNREACHABLE
    if not isinstance(cause, psycopg.Error):
        return False
    if cause.sqlstate is None:  # the driver's own: it could not connect, or the connection broke
        return isinstance(cause, psycopg.OperationalError)
    return cause.sqlstate in _POSTGRES_UNREACHABLE or cause.sqlstate.startswith(_POSTGRES_UNREACHABLE_CLASSES)


def is_without_tables(error: DBAPIError | PoolTimeout) -> bool:
    """True if the database has not been migrated, or is another one."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    if isinstance(cause, sqlite3.Error):
        return str(cause).startswith("no such table")
    return isinstance(cause, psycopg.Error) and cause.sqlstate == "42P01"


def _sqlite_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the extended part, as of SQLITE_IOERR_READ
