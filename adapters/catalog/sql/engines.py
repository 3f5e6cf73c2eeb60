"""Connections to SQLite and PostgreSQL, configured for the catalog."""

from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError

LOCK_TIMEOUT_S = 5  # waiting for another process's writer
SQLITE_LOCK_TIMEOUT_S = 20  # SQLite has no queue: of many writers one can lose the race again and again
POOL_TIMEOUT_S = 10  # waiting for a connection that another thread uses
_CONNECT_TIMEOUT_S = 5
_MAX_CONNECTIONS = 20
_STATEMENT_TIMEOUT_S = 60
_IDLE_WRITER_TIMEOUT_S = 15  # a stalled writer blocks all others


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
