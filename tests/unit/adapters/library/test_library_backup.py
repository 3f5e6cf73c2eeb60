"""Backups of a catalog and its store: complete beside writers, restored as they were, refused when damaged."""

import itertools
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
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
from adapters.catalog.records import AliasTarget, AuditEvent, Grant
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


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[tuple[SqlCatalog, AdapterStore]]:
    """An empty catalog and store."""
    with closing(SqlCatalog.open(f"sqlite:///{tmp_path}/fresh.db")) as catalog:
        yield catalog, open_store(f"file://{tmp_path}/fresh")


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
    catalog.set_alias("acme", "bot", "live", AliasTarget.split([(1, 90), (2, 10)]))
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
def test_a_router_that_still_notes_events_waits(database, library, folder, monkeypatch):
    """It writes while the catalog is filled, and would take the ids of events that are copied."""
    catalog = library.catalog
    catalog.audit.append([EVENT, EVENT])
    back_up(catalog, library.store, folder)
    database.query("TRUNCATE audit_events RESTART IDENTITY")
    with ThreadPoolExecutor(1) as pool, closing(SqlCatalog.open(database.url)) as router:

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
        with closing(SqlCatalog.open(database.url)) as catalog:
            mine = AdapterLibrary(catalog, library.store, library.base, library.limits, "bfloat16")
            for number in itertools.count():
                if enough.is_set():
                    return
                name = f"bot{worker}-{number % 3}"
                with suppress(CatalogConflict, RevisionBeingRemoved):  # deleted, and not yet collected
                    mine.import_directory(name, sources[number % 4])
                    catalog.delete("default", name)
                with suppress(CatalogConflict):
                    mine.collect_garbage(TOMORROW)
                    collections.release()

    def backed_up() -> Outcome:
        while True:
            with suppress(CatalogConflict):  # while a collection runs
                return back_up(library.catalog, library.store, folder)

    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(churn, worker) for worker in range(2)]
        try:
            for number in range(8):
                assert all(collections.acquire(timeout=120) for _ in range(2))
                done = backed_up()
                assert done.lacking == []
                folder.fetch_catalog(done.catalog, tmp_path / f"{number}.db")
                with closing(SqlCatalog.open(f"sqlite:///{tmp_path}/{number}.db")) as kept:
                    for each in kept.referenced_revisions():
                        folder.store.verify(each)
        finally:
            enough.set()
        for each in working:
            each.result()


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


def test_what_the_store_lacks_is_named(library, lora, folder, fresh):
    good, *bad = (library.import_directory(f"bot{seed}", lora(seed)).revision_id for seed in range(3))
    overwrite(library.store, key_of(bad[0]), raw(library.store, key_of(bad[0]))[:-1])
    library.store.delete(bad[1])
    with pytest.raises(StoreCorrupt, match=f"was added without 2 .*: {', '.join(sorted(bad))}. Import them again"):
        back_up(library.catalog, library.store, folder)
    with pytest.raises(StoreCorrupt, match=f"lacks 2 .*: {', '.join(sorted(bad))}. Nothing was restored"):
        restore(folder, *fresh)
    assert restore(folder, *fresh, allow_missing=True).lacking == sorted(bad)
    assert stored(fresh[1]) == [good]
    assert fresh[0].resolve("bot1").revision_id == bad[0]


def test_a_damaged_backup_restores_nothing(library, lora, folder, fresh):
    revisions = [library.import_directory(f"bot{seed}", lora(seed)).revision_id for seed in range(2)]
    catalog_key = f"catalogs/{back_up(library.catalog, library.store, folder).catalog}"
    for key, name, other in (
        (catalog_key, f"{catalog_key} .* is damaged or was changed", b""),
        (key_of(revisions[1]), f"lacks 1 .*: {revisions[1]}. Nothing", raw(folder.store, key_of(revisions[0]))),
    ):
        good = raw(folder.store, key)
        flipped = bytes([*good[:5000], good[5000] ^ 1, *good[5001:]])
        for data in (other, good[:-1], good + b"0", flipped):
            overwrite(folder.store, key, data)
            with pytest.raises(StoreCorrupt, match=name):
                restore(folder, *fresh)
            assert [table for table, rows in rows_of(fresh[0]).items() if rows] == stored(fresh[1]) == []
        overwrite(folder.store, key, good)
    assert restore(folder, *fresh).num_copied == 2


def test_no_tenant_of_a_restored_catalog_is_one_that_was_deleted_since(library, lora, folder, fresh):
    """Trainers and prefix caches, which are not restored, tell tenants of a name by the generation."""
    library.import_directory("acme/bot", lora(1))
    back_up(library.catalog, library.store, folder)
    restore(folder, *fresh)
    lost, restored = (each.tenants.remove("acme").generation for each in (library.catalog, fresh[0]))
    assert len({0, lost, restored}) == 3
    assert lost + 1 != restored  # as 0.1.0 would have counted on
    assert max(lost, restored) + 1000 < 2**31


def test_an_earlier_catalog_is_restored_by_name(library, lora, folder, fresh):
    library.import_directory("other", lora(0))
    revision_id = library.import_directory("bot", lora(1)).revision_id
    first = back_up(library.catalog, library.store, folder).catalog
    library.import_directory("bot", lora(2))
    second = back_up(library.catalog, library.store, folder).catalog
    for name in ("20261129T000000.db", f"../{first}", second[:-3]):
        with pytest.raises(ValueError, match="has no catalog"):
            restore(folder, *fresh, name)
    overwrite(library.store, key_of(revision_id), raw(library.store, key_of(revision_id))[:-1])
    assert restore(folder, fresh[0], library.store, first).num_copied == 1  # the store still has the other's
    assert library.store.verify(revision_id)
    assert fresh[0].resolve("bot").number == 1


def test_only_an_empty_catalog_is_filled(library, lora, folder, fresh):
    library.import_directory("bot", lora(1))
    back_up(library.catalog, library.store, folder)
    fresh[0].audit.append([EVENT])
    with pytest.raises(CatalogConflict, match="not empty: audit_events has rows"):
        restore(folder, *fresh)
    with library.catalog.snapshot() as rows, pytest.raises(CatalogConflict):  # also if the rows came meanwhile
        fresh[0].write(lambda transaction: copy_rows(rows, transaction.connection))
    assert [table for table, rows in rows_of(fresh[0]).items() if rows] == ["audit_events"]
    assert stored(fresh[1]) == []


def test_the_tables_of_other_releases(library, lora, folder, fresh, tmp_path):
    """Those of 0.1.0 had no usage; those of a later release are refused. The newest is restored."""
    library.import_directory("bot", lora(1))
    back_up(library.catalog, library.store, folder)
    for number, statement in enumerate((
        "DROP TABLE token_usage", "UPDATE alembic_version SET version_num = '0008'"
    )):  # fmt: skip
        folder.fetch_catalog("", file := tmp_path / f"{number}.db")
        with sqlite3.connect(file) as connection:
            connection.execute(statement)
        connection.close()
        folder.add_catalog(file, NOW + timedelta(days=36500 + number))
        if number == 0:
            restore(folder, *fresh)
    assert fresh[0].resolve("bot").number == 1
    with (
        closing(SqlCatalog.open(f"sqlite:///{tmp_path}/new.db")) as catalog,
        pytest.raises(CatalogTooNew, match="0008"),
    ):
        restore(folder, catalog, fresh[1])


def test_signatures_are_kept_and_missing_ones_counted(library, lora, folder, tmp_path):
    signer, key = Signer.generate(), key_of(library.import_directory("bot", lora(1)).revision_id)
    back_up(library.catalog, library.store, folder)
    AdapterStore(library.store._objects, signer).sign(library.catalog.resolve("bot").revision_id)
    assert back_up(library.catalog, library.store, folder).num_copied == 1  # it has a signature now
    for number, (own, num_unsigned) in enumerate(((signer, 0), (Signer.generate(), 1), (None, 0))):
        with closing(SqlCatalog.open(f"sqlite:///{tmp_path}/new{number}.db")) as catalog:
            store = open_store(f"file://{tmp_path}/new-store{number}", signer=own)
            assert restore(folder, catalog, store).num_unsigned == num_unsigned
            assert raw(store, key) == raw(library.store, key)


def test_what_killed_backups_left_is_removed(library, folder, monkeypatch):
    overwrite(folder.store, "incoming/left", b"half")
    for abandoned_s, num_left in ((86400, 1), (-1, 0)):  # another backup may be writing it
        monkeypatch.setattr("adapters.backup.backup._ABANDONED_S", abandoned_s)
        back_up(library.catalog, library.store, folder)
        assert num_incoming(folder.store) == num_left


@pytest.mark.slow
def test_in_a_bucket(library, lora, fresh, tmp_path, monkeypatch):
    library.import_directory("bot", lora(1))
    with s3_double() as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
        back_up(library.catalog, library.store, BackupFolder(f"s3://{BUCKET}/{tmp_path.name}", is_new=True))
        folder = BackupFolder(f"s3://{BUCKET}/{tmp_path.name}", is_new=False)
        assert back_up(library.catalog, library.store, folder).num_copied == 0
        assert restore(folder, *fresh).num_copied == 1
        assert fresh[1].verify(fresh[0].resolve("bot").revision_id)
