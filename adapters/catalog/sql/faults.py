"""Classify a database's errors: transient, unreachable, or a bug of ours."""

import sqlite3

import psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

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
