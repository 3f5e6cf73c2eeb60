"""The catalog's database: migrations, URLs, settings, and outages."""

import threading
import time

import pytest
from sqlalchemy import text
from support.adapters.catalog_databases import add

from adapters.catalog.sql import SqlCatalog, drivers
from adapters.catalog.sql import database as database_module
from adapters.errors import CatalogTooNew, CatalogUnavailable


def test_many_processes_may_migrate_at_once(database):
    catalogs: list[SqlCatalog] = []
    threads = [threading.Thread(target=lambda: catalogs.append(SqlCatalog.open(database.url))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [catalog.last_change() for catalog in catalogs] == [0] * 4
    for catalog in catalogs:
        catalog.close()


def test_tables_of_a_newer_release_are_left_alone(catalog, database):
    database.query("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(CatalogTooNew, match="at step 9999, which this release does not know; its own is 0007"):
        SqlCatalog.open(database.url)


def test_a_writer_waits_for_another_process(catalog, database):
    add(catalog, "bot", 1)
    done: list[float] = []
    thread = threading.Thread(target=lambda: (add(catalog, "bot", 2), done.append(time.monotonic())))
    with database.locked():
        thread.start()
        time.sleep(0.3)
        assert catalog.resolve("bot").number == 1  # readers do not
        released = time.monotonic()
    thread.join()
    assert done[0] >= released
    assert catalog.resolve("bot").number == 2


def test_a_writer_does_not_wait_for_ever(database, monkeypatch):
    monkeypatch.setattr(drivers, "LOCK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(drivers, "SQLITE_LOCK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(database_module, "_ATTEMPTS", 3)
    SqlCatalog.open(database.url).close()
    catalog = SqlCatalog(database.url)
    with database.locked(), pytest.raises(CatalogUnavailable, match="lock"):
        add(catalog, "bot", 1)
    assert add(catalog, "bot", 1).number == 1
    catalog.close()


def test_a_database_that_is_down(catalog, database):
    add(catalog, "bot", 1)
    with database.down(catalog):
        for use in (
            lambda: catalog.resolve("bot"),
            lambda: catalog.list(),
            lambda: add(catalog, "bot", 2),
            lambda: catalog.set_alias("default", "bot", "prod", 1),
            lambda: catalog.last_change(),
            lambda: list(catalog.referenced_revisions()),
        ):
            with pytest.raises(CatalogUnavailable, match="does not answer") as caught:
                use()
            assert (caught.value.http_status, caught.value.retryable) == (503, True)
            assert ("may write to its folder" in str(caught.value)) is (database.kind == "sqlite")
    assert catalog.resolve("bot").number == 1
    assert add(catalog, "bot", 2).number == 2


def test_connections_that_died_meanwhile_are_replaced(catalog, database):
    cut = catalog.close if database.kind == "sqlite" else database.cut_connections
    add(catalog, "bot", 1)
    cut()
    assert catalog.resolve("bot").number == 1
    cut()
    assert add(catalog, "bot", 2).number == 2


@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_a_commit_that_may_have_happened_is_not_repeated(catalog, database):
    times = 0

    def work(connection):
        nonlocal times
        times += 1
        connection.execute(text("SELECT 1"))
        database.cut_connections()

    with pytest.raises(CatalogUnavailable, match="whether the change was made is not known"):
        catalog.transact(work)
    assert times == 1


@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_a_process_that_stood_still_in_a_transaction_begins_it_again(catalog, monkeypatch):
    monkeypatch.setattr(database_module, "LOCK_TIMEOUT_S", 0.1)  # which is for waits behind others
    times = 0

    def work(connection):
        nonlocal times
        times += 1
        if times == 1:
            connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = '50ms'"))
            time.sleep(0.5)
        return connection.execute(text("SELECT 7")).scalar_one()

    assert catalog.transact(work) == 7
    assert times == 2
    assert add(catalog, "bot", 1).number == 1


def test_a_database_without_tables(database):
    catalog = SqlCatalog(database.url)
    with pytest.raises(CatalogUnavailable, match="none of the catalog's tables; migrate it"):
        catalog.resolve("bot")
    catalog.close()


def test_databases_that_are_not_there(tmp_path):
    with pytest.raises(CatalogUnavailable, match="unable to open database file"):
        SqlCatalog.open(f"sqlite:///{tmp_path}/no/catalog.db")
    (tmp_path / "notes.txt").write_text("no database\n" * 100)
    with pytest.raises(CatalogUnavailable, match="file is not a database"):
        SqlCatalog.open(f"sqlite:///{tmp_path}/notes.txt")
    with pytest.raises(CatalogUnavailable) as caught:
        SqlCatalog.open("postgresql://ann:secret@127.0.0.1:1/catalog")
    assert "127.0.0.1" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "catalog.db", "sqlite://", "sqlite:///:memory:", "mysql://ann:secret@host/x"])
def test_urls_that_are_none(url):
    with pytest.raises(ValueError, match="it is sqlite:///FILE, or postgresql://") as caught:
        SqlCatalog(url)
    assert "secret" not in str(caught.value)


def test_how_sqlite_is_set(catalog, database):
    wanted = {
        "sqlite": {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1},
        "postgres": {"lock_timeout": "5s"},
    }
    with catalog._reads.connect() as connection:
        for name, value in wanted[database.kind].items():
            query = f"PRAGMA {name}" if database.kind == "sqlite" else f"SHOW {name}"
            assert connection.exec_driver_sql(query).scalar() == value
