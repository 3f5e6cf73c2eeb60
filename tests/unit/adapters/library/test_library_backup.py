"""Backups of a catalog and its store: complete beside writers, restored as they were, refused when damaged."""

import contextlib
import hashlib
import itertools
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from support.adapters.catalog_databases import TOMORROW, CatalogDatabase, PostgresDatabase, SqliteDatabase, add
from support.adapters.s3_server import BUCKET, s3_double
from support.adapters.stored_objects import num_incoming, overwrite, raw, revision, source, stored
from support.waiting import wait_until

from adapters.backup.backup import Outcome, back_up, restore
from adapters.backup.folder import BackupFolder
from adapters.backup.rows import _COPIED, check_empty, copy_rows
from adapters.catalog.records import AuditEvent, Grant
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.tables import tenants
from adapters.catalog.usage import Counts, Subject
from adapters.errors import CatalogConflict, CatalogTooNew, CatalogUnavailable, RevisionBeingRemoved
from adapters.library import AdapterLibrary
from adapters.scopes import Permission, Scope
from adapters.store import AdapterStore, StoreCorrupt, open_store
from adapters.store.layout import key_of
from adapters.store.signing import Signer

NOW = datetime(2026, 11, 29, 13, 30, 15, 123456, UTC)
EVENT = AuditEvent(NOW, "someone", "acme", "adapter.import", "acme/bot", None, "sha256:1", "done", "request-1")


@pytest.fixture
def folder(tmp_path: Path) -> BackupFolder:
    return BackupFolder(str(tmp_path / "backup"), is_new=True)


@contextmanager
def opened(database: CatalogDatabase) -> Iterator[SqlCatalog]:
    catalog = SqlCatalog.open(database.url)
    try:
        yield catalog
    finally:
        catalog.close()


def rows_of(catalog: SqlCatalog) -> dict[str, list[Any]]:
    """All rows that a backup has, by table."""
    with catalog.snapshot() as connection:
        return {table.name: sorted(map(repr, connection.execute(select(table)))) for table in _COPIED}


def filled(library: AdapterLibrary, lora: Any, tmp_path: Path) -> str:
    """Put rows into every table, and objects into the store; return a key."""
    catalog = library.catalog
    for seed in (1, 2, 3):
        library.import_directory("acme/bot", lora(seed), alias="live" if seed == 2 else None)
    catalog.rollback("acme", "bot")
    library.import_directory("gone", lora(4))
    library.collect_garbage(TOMORROW)
    catalog.delete("default", "gone")
    library.import_directory("collected", lora(5))
    catalog.tenants.remove("default")  # the next of its name is another one
    library.collect_garbage(TOMORROW)
    library.import_directory("deleted", lora(6))
    catalog.delete("default", "deleted")
    library.add_in_memory("acme/pushed", library.pack("acme/pushed", lora(7), tmp_path / "packed"), "latest")
    _, key = catalog.keys.create("acme", "first", {Scope.INFER}, expires_at=TOMORROW, by="test")
    revoked, _ = catalog.keys.create("beta", "second", {Scope.INFER, Scope.ADMIN}, expires_at=None, by=None)
    catalog.keys.revoke(revoked.key_id)
    catalog.grants.add(Grant("acme", "bot", "beta", Permission.INFER), by="test")
    catalog.grants.set_shared_prefixes("acme", "bot", True)
    catalog.audit.append([EVENT])
    catalog.usage.put([(Subject(495_000, "acme", "", "acme/bot", "sha256:1", "demo"), Counts(2, 1, 14, 5, 6, "r1"))])
    assert [name for name, rows in rows_of(catalog).items() if not rows] == []
    return key


def others(request: pytest.FixtureRequest, database: CatalogDatabase, tmp_path: Path) -> list[CatalogDatabase]:
    """Databases to restore into, one after the other: of the other kind first, if the first is PostgreSQL."""
    found: list[CatalogDatabase] = [SqliteDatabase(tmp_path / "restored")]
    if isinstance(database, PostgresDatabase):
        url = request.getfixturevalue("postgres")
        found += [PostgresDatabase(url, f"{database._name}_restored"), SqliteDatabase(tmp_path / "again")]
    return found


def test_every_row_and_object_comes_back(request, library, lora, database, folder, tmp_path):
    key = filled(library, lora, tmp_path)
    catalog, store = library.catalog, library.store
    for number, other in enumerate(others(request, database, tmp_path)):
        wanted, last = rows_of(catalog), catalog.last_change()
        objects = {each: raw(store, key_of(each)) for each in catalog.referenced_revisions()}
        name = back_up(catalog, store, folder).catalog
        catalog, store = SqlCatalog.open(other.url), open_store(f"file://{tmp_path}/store-{number}")
        request.addfinalizer(catalog.close)
        assert restore(folder, catalog, store) == Outcome(name, len(objects), len(objects))
        assert rows_of(catalog) == wanted
        assert {each: raw(store, key_of(each)) for each in stored(store)} == objects
        assert catalog.changes_since(last) == []  # of those that it cannot have seen: a follower starts over
        assert catalog.last_change() > last + 100_000
        goes_on(catalog, store, tmp_path, number)
    assert key not in str(wanted)  # digests only


def goes_on(catalog: SqlCatalog, store: AdapterStore, folder: Path, number: int) -> None:
    """Change a restored catalog, which answers as the original would have."""
    for name, content, expected in (("bot", f"more {number}", 4 + number), (f"new{number}", f"new {number}", 1)):
        store.publish(revision(content), source(folder, content.encode()))
        assert add(catalog, name, content, "acme", rank=4 + number).number == expected
    assert catalog.rollback("acme", "bot").to_number == 2
    catalog.restore("default", "deleted")
    catalog.delete("default", "deleted")
    catalog.audit.append([EVENT])
    assert len(catalog.audit.newest(100)) == 2 + number


@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgres"], indirect=True)  # SQLite has one writer
def test_a_router_that_still_notes_events_waits(database, library, folder, tmp_path, monkeypatch):
    """It writes while the catalog is filled, and would take the ids of events that are copied."""
    catalog = library.catalog
    with opened(SqliteDatabase(tmp_path / "first")) as first:
        first.audit.append([EVENT, EVENT])
        back_up(first, library.store, folder)
    with ThreadPoolExecutor(1) as pool, opened(database) as router:

        def then_noted(target: Any) -> None:
            check_empty(target)
            appending = pool.submit(router.audit.append, [replace(EVENT, who="router")])
            waiting = "SELECT 1 FROM pg_locks WHERE NOT granted"
            wait_until(lambda: appending.done() or database.query(waiting))

        with monkeypatch.context() as patched:
            patched.setattr("adapters.backup.rows.check_empty", then_noted)
            restore(folder, catalog, library.store)
    assert [each.who for each in catalog.audit.newest(10)] == ["someone", "someone", "router"]


def test_the_next_backup_copies_what_is_new(library, lora, folder, monkeypatch):
    first = library.import_directory("bot", lora(1)).revision_id
    assert back_up(library.catalog, library.store, folder).num_copied == 1
    second = library.import_directory("bot", lora(2)).revision_id
    copied: list[str] = []
    copy = AdapterStore.copy
    monkeypatch.setattr(
        AdapterStore, "copy", lambda store, each, source: (copied.append(each), copy(store, each, source))[1]
    )
    back_up(library.catalog, library.store, folder)
    assert copied == [second]
    overwrite(folder.store, key_of(first), raw(folder.store, key_of(first))[:-1])
    back_up(library.catalog, library.store, folder)
    assert copied == [second, first]
    assert folder.store.verify(first)


def test_what_is_read_is_of_one_instant(catalog):
    add(catalog, "bot", 1)
    with catalog.snapshot() as rows:
        assert len(rows.execute(select(tenants)).all()) == 1
        add(catalog, "bot", 2, tenant="new")  # nobody waits
        catalog.delete("default", "bot")
        after = {table.name: rows.execute(select(table)).all() for table in _COPIED}
    assert len(after["tenants"]) == len(after["adapters"]) == len(after["revisions"]) == 1
    assert after["adapters"][0].deleted_at is None


def test_what_goes_before_the_catalog_is_read_is_not_needed(library, lora, folder, monkeypatch):
    """It is deleted and collected while the first round copies."""
    kept, gone = (library.import_directory(name, lora(seed)).revision_id for seed, name in enumerate(("kept", "gone")))
    copy = AdapterStore.copy

    def after_a_collection(store, revision_id, source):
        if revision_id == gone:
            library.catalog.delete("default", "gone")
            assert library.collect_garbage(TOMORROW) == 1
        return copy(store, revision_id, source)

    monkeypatch.setattr(AdapterStore, "copy", after_a_collection)
    done = back_up(library.catalog, library.store, folder)
    assert (done.num_revisions, done.num_copied, done.lacking) == (1, 1, [])
    assert stored(folder.store) == [kept]


def test_nothing_goes_between_the_catalog_and_its_revisions(library, lora, database, folder, monkeypatch):
    """An adapter comes after the first round; once the catalog was read, it is deleted, and a collection is refused."""
    other = SqlCatalog(database.url)

    def then_deleted(source, target):
        library.import_directory("bot", lora(1))
        copy_rows(source, target)
        other.delete("default", "bot")
        with pytest.raises(CatalogConflict, match="a backup of this catalog runs"):
            library.collect_garbage(TOMORROW)
        assert library.fsck(0, repair=True).num_repaired == 0

    monkeypatch.setattr("adapters.backup.backup.copy_rows", then_deleted)
    done = back_up(library.catalog, library.store, folder)
    assert (done.num_revisions, done.num_copied, done.lacking) == (1, 1, [])
    assert library.collect_garbage(TOMORROW) == 1
    assert stored(library.store) == []
    assert len(stored(folder.store)) == 1
    other.close()


@pytest.mark.slow
def test_backups_beside_imports_deletions_and_collections(library, lora, database, folder, tmp_path):
    """Whatever the order, each backup has all that its catalog needs."""
    sources = [lora(seed) for seed in range(4)]
    enough, collections = threading.Event(), threading.Semaphore(0)

    def churn(worker: int) -> None:
        with opened(database) as catalog:
            mine = AdapterLibrary(catalog, library.store, library.base, library.limits, "bfloat16")
            for number in itertools.count():
                if enough.is_set():
                    return
                name = f"bot{worker}-{number % 3}"
                with contextlib.suppress(CatalogConflict, RevisionBeingRemoved):  # deleted, and not yet collected
                    mine.import_directory(name, sources[number % 4])
                    catalog.delete("default", name)
                with contextlib.suppress(CatalogConflict):
                    mine.collect_garbage(TOMORROW)
                    collections.release()

    def backed_up() -> Outcome:
        while True:
            with contextlib.suppress(CatalogConflict):  # while a collection runs
                return back_up(library.catalog, library.store, folder)

    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(churn, worker) for worker in range(2)]
        try:
            for number in range(8):
                assert all(collections.acquire(timeout=60) for _ in range(2))
                done = backed_up()
                assert done.lacking == []
                folder.fetch_catalog(done.catalog, tmp_path / f"{number}.db")
                with opened_file(tmp_path / f"{number}.db") as kept:
                    for each in kept.referenced_revisions():
                        folder.store.verify(each)
        finally:
            enough.set()
        for each in working:
            each.result()


@contextmanager
def opened_file(file: Path) -> Iterator[SqlCatalog]:
    catalog = SqlCatalog.open(f"sqlite:///{file}")
    try:
        yield catalog
    finally:
        catalog.close()


@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgres"], indirect=True)  # a file's lock is lost with its process only
def test_a_backup_that_has_lost_its_right_adds_no_catalog(library, lora, database, folder, monkeypatch):
    copy = AdapterStore.copy

    def one_more(source, target):
        library.import_directory("bot", lora(1))
        copy_rows(source, target)

    def cut_after(store, revision_id, source):
        copy(store, revision_id, source)
        database.cut_connections()

    with monkeypatch.context() as patched:
        patched.setattr("adapters.backup.backup.copy_rows", one_more)
        patched.setattr(AdapterStore, "copy", cut_after)
        with pytest.raises(CatalogUnavailable):
            back_up(library.catalog, library.store, folder)
    assert folder._objects.list_folder("catalogs") == []
    assert back_up(library.catalog, library.store, folder).num_copied == 0  # it goes on


def test_what_the_store_lacks_is_named(library, lora, folder, tmp_path):
    good, damaged, absent = (library.import_directory(f"bot{seed}", lora(seed)).revision_id for seed in range(3))
    overwrite(library.store, key_of(damaged), raw(library.store, key_of(damaged))[:-1])
    library.store.delete(absent)
    first, last = sorted([damaged, absent])
    with pytest.raises(StoreCorrupt, match=f"was added without .*: {first}, {last}. Import them again"):
        back_up(library.catalog, library.store, folder)
    with opened(SqliteDatabase(tmp_path / "new")) as catalog:
        store = open_store(f"file://{tmp_path}/new-store")
        with pytest.raises(StoreCorrupt):
            restore(folder, catalog, store)
        done = restore(folder, catalog, store, allow_missing=True)
        assert sorted(done.lacking) == sorted([damaged, absent])
        assert stored(store) == [good]
        assert catalog.resolve("bot1").revision_id == damaged


def test_a_damaged_backup_restores_nothing(library, lora, folder, tmp_path):
    revisions = [library.import_directory(f"bot{seed}", lora(seed)).revision_id for seed in range(3)]
    key = f"catalogs/{back_up(library.catalog, library.store, folder).catalog}"
    catalog_file, objects = raw(folder.store, key), {each: raw(folder.store, key_of(each)) for each in revisions}
    flipped = bytearray(objects[revisions[1]])
    flipped[-70] ^= 1
    with opened(SqliteDatabase(tmp_path / "new")) as catalog:
        store = open_store(f"file://{tmp_path}/new-store")

        def refused(name: str, damaged_key: str, data: bytes, good: bytes) -> None:
            overwrite(folder.store, damaged_key, data)
            with pytest.raises(StoreCorrupt, match=name):
                restore(folder, catalog, store)
            overwrite(folder.store, damaged_key, good)
            assert [table for table, rows in rows_of(catalog).items() if rows] == []
            assert stored(store) == []

        for data in (b"", catalog_file[:-1], catalog_file[:5000] + b"!" + catalog_file[5001:], catalog_file + b"0"):
            refused(f"{key} .* is damaged or was changed", key, data, catalog_file)
        for data in (b"", objects[revisions[1]][:-1], bytes(flipped), objects[revisions[0]]):
            refused(f"damaged: {revisions[1]}. Nothing", key_of(revisions[1]), data, objects[revisions[1]])
        for each in revisions[1:]:
            folder.store.delete(each)
        with pytest.raises(StoreCorrupt, match=f"{min(revisions[1:])}, {max(revisions[1:])}"):
            restore(folder, catalog, store)
        for each in revisions[1:]:
            overwrite(folder.store, key_of(each), objects[each])
        assert restore(folder, catalog, store).num_copied == 3


def test_an_earlier_catalog_is_restored_by_name(library, lora, folder, tmp_path):
    library.import_directory("bot", lora(1))
    first = back_up(library.catalog, library.store, folder).catalog
    library.import_directory("bot", lora(2))
    second = back_up(library.catalog, library.store, folder).catalog
    with opened(SqliteDatabase(tmp_path / "new")) as catalog:
        for name in ("20261129T000000.db", f"../{first}", second[:-3]):
            with pytest.raises(ValueError, match="has no catalog"):
                restore(folder, catalog, library.store, name=name)
        assert restore(folder, catalog, library.store, name=first).num_copied == 0  # the store still has it
        assert catalog.resolve("bot").number == 1
    with opened(SqliteDatabase(tmp_path / "newer")) as catalog:
        assert restore(folder, catalog, library.store).catalog == second


def test_only_an_empty_catalog_is_filled(library, lora, folder, tmp_path):
    library.import_directory("bot", lora(1))
    back_up(library.catalog, library.store, folder)
    with opened(SqliteDatabase(tmp_path / "new")) as catalog:
        catalog.audit.append([EVENT])
        before = rows_of(catalog)
        with pytest.raises(CatalogConflict, match="not empty: audit_events has rows"):
            restore(folder, catalog, open_store(f"file://{tmp_path}/new-store"))
        with library.catalog.snapshot() as rows, pytest.raises(CatalogConflict):  # also if the rows came meanwhile
            catalog.fill(lambda target: copy_rows(rows, target))
        assert rows_of(catalog) == before
    assert stored(open_store(f"file://{tmp_path}/new-store")) == []


def test_the_tables_of_other_releases(library, lora, folder, tmp_path):
    """Those of 0.1.0 had no usage; those of a later release are refused."""
    library.import_directory("bot", lora(1))

    def changed(name: str, statement: str) -> str:
        file = tmp_path / f"{hashlib.sha256(statement.encode()).hexdigest()}.db"
        folder.fetch_catalog(name, file)
        connection = sqlite3.connect(file)
        connection.execute(statement)
        connection.commit()
        connection.close()
        return folder.add_catalog(file, NOW)

    name = back_up(library.catalog, library.store, folder).catalog
    earlier = changed(name, "DROP TABLE token_usage")
    later = changed(name, "UPDATE alembic_version SET version_num = '0008'")
    with opened(SqliteDatabase(tmp_path / "new")) as catalog:
        with pytest.raises(CatalogTooNew, match="0008"):
            restore(folder, catalog, library.store, name=later)
        restore(folder, catalog, library.store, name=earlier)
        assert catalog.resolve("bot").number == 1


def test_signatures_are_kept_and_missing_ones_counted(library, lora, folder, tmp_path):
    signer = Signer.generate()
    signing = AdapterStore(library.store._objects, signer)
    revision_id = library.import_directory("bot", lora(1)).revision_id
    back_up(library.catalog, library.store, folder)
    signing.sign(revision_id)
    assert back_up(library.catalog, library.store, folder).num_copied == 1  # it has a signature now
    for number, (key, num_unsigned) in enumerate(((signer, 0), (Signer.generate(), 1), (None, 0))):
        with opened(SqliteDatabase(tmp_path / f"new{number}")) as catalog:
            store = open_store(f"file://{tmp_path}/new-store{number}", signer=key)
            assert restore(folder, catalog, store).num_unsigned == num_unsigned
            assert raw(store, key_of(revision_id)) == raw(library.store, key_of(revision_id))


def test_what_killed_backups_left_is_removed(library, folder, monkeypatch):
    overwrite(folder.store, "incoming/left", b"half")
    back_up(library.catalog, library.store, folder)
    assert num_incoming(folder.store) == 1  # another backup may be writing it
    monkeypatch.setattr("adapters.backup.backup._ABANDONED_S", -1.0)
    back_up(library.catalog, library.store, folder)
    assert num_incoming(folder.store) == 0


def test_folders_that_cannot_be_meant(library, tmp_path):
    with pytest.raises(ValueError, match="is the store itself; name another folder"):
        back_up(library.catalog, library.store, BackupFolder(f"{tmp_path}/store/", is_new=True))
    with pytest.raises(ValueError, match="nowhere does not exist; name the folder"):
        BackupFolder(f"{tmp_path}/nowhere", is_new=False)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no catalog ; it has none"):
        BackupFolder(f"{tmp_path}/empty", is_new=False).fetch_catalog("", tmp_path / "catalog.db")


@pytest.mark.slow
def test_in_a_bucket(library, lora, tmp_path):
    library.import_directory("bot", lora(1))
    with s3_double() as s3:
        back_up(library.catalog, library.store, BackupFolder(f"s3://{BUCKET}/{tmp_path.name}", s3, is_new=True))
        folder = BackupFolder(f"s3://{BUCKET}/{tmp_path.name}", s3, is_new=False)
        assert back_up(library.catalog, library.store, folder).num_copied == 0
        with opened(SqliteDatabase(tmp_path / "new")) as catalog:
            store = open_store(f"s3://{BUCKET}/{tmp_path.name}-new", s3)
            assert restore(folder, catalog, store).num_copied == 1
            assert store.verify(catalog.resolve("bot").revision_id)
