"""The catalog in SQLite and in PostgreSQL."""

from __future__ import annotations

import random
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, event, text
from support.catalog_databases import add, content, manifest

from adapters.catalog.sql import SqlCatalog, engines, lookup
from adapters.catalog.sql import catalog as catalog_module
from adapters.catalog.sql import database as database_module
from adapters.catalog.sql.tables import metadata
from adapters.errors import (
    AdapterNotFound,
    CatalogConflict,
    CatalogTooNew,
    CatalogUnavailable,
    InvalidReference,
    RevisionBeingRemoved,
)
from adapters.model.manifest import Manifest

TOMORROW = datetime.now(UTC) + timedelta(days=1)


def test_the_migrations_make_the_tables_that_the_queries_expect(catalog, database):
    with catalog._database.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    again = SqlCatalog.open(database.url)
    assert again.last_change() == 0
    again.close()


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
    with pytest.raises(CatalogTooNew, match="at step 9999, this release knows steps up to 0004"):
        SqlCatalog.open(database.url)


def test_a_revision_by_every_reference(catalog):
    before = datetime.now(UTC)
    first, second = add(catalog, "bot", 1), add(catalog, "bot", 2, rank=4)
    catalog.set_alias("default", "bot", "prod", 1)
    for reference in ("bot@r1", "bot@prod", f"bot@{content(1)}", "default/bot@r1"):
        assert catalog.resolve(reference) == first
    assert catalog.resolve("bot") == catalog.resolve("bot@latest") == second
    assert (second.full_name, second.number, second.revision_id, second.bytes) == ("bot", 2, content(2), 1000)
    assert second.manifest == manifest(4)
    assert before <= second.created_at <= datetime.now(UTC)
    assert add(catalog, "bot", 1, tenant="acme").full_name == "acme/bot"


def test_a_manifest_survives_its_json():
    assert Manifest.from_json(manifest().to_json()) == manifest()


def test_queries_read_indexes_only_and_resolving_is_one(catalog, database):
    for number in range(20):
        add(catalog, f"a{number}", number)
    catalog.resolve("a0")
    queries: list[tuple[str, object]] = []

    def note(connection, cursor, statement, parameters, context, many):
        queries.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        for reference in ("a3", "a3@r1", f"a3@{content(3)}"):
            catalog.resolve(reference)
        assert len(queries) == 3
        catalog.list(after=("default", "a3"), limit=3)
        catalog.list("default", prefix="a", after=("default", "a3"), limit=3)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    explain = {"sqlite": "EXPLAIN QUERY PLAN ", "postgres": "EXPLAIN "}[database.kind]
    with catalog._database.connect() as connection:
        if database.kind == "postgres":  # which reads a table of a few rows from end to end otherwise
            connection.execute(text("SET enable_seqscan = off"))
            connection.execute(text("ANALYZE"))
        for statement, parameters in queries:
            plan = str(connection.exec_driver_sql(explain + statement, parameters).all())
            for slow in ("SCAN", "Seq Scan", "TEMP B-TREE", "Sort"):
                assert slow not in plan, plan
        connection.invalidate()  # the setting goes with it


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("suport-bot", r"no adapter 'suport-bot'; did you mean 'support-bot'\?$"),
        ("upport-bot", r"did you mean 'support-bot'\?$"),
        ("qqq", "no adapter 'qqq'$"),
        ("acme/suport-bot", "no adapter 'acme/suport-bot'$"),  # another tenant's names are not told
        ("support-bot@prod", "no alias 'prod'; it has 'latest'$"),
        ("support-bot@r2", "no revision r2; its newest is r1$"),
        (f"support-bot@{content(9)}", "no revision sha256:.*; its newest is r1$"),
        ("gone", "'gone' was deleted on .* UTC; restore it$"),
        ("gone@r1", "'gone' was deleted on"),
    ],
)
def test_references_that_are_not_found(catalog, reference, says):
    for name in ("support-bot", "zebra", "gone"):
        add(catalog, name, name)
    add(catalog, "x", 9, tenant="acme")
    catalog.delete("default", "gone")
    with pytest.raises(AdapterNotFound, match=says):
        catalog.resolve(reference)


def test_a_near_miss_among_many_names_looks_at_few(catalog, monkeypatch):
    monkeypatch.setattr(lookup, "_NEIGHBOURS", 5)
    for number in range(30):
        add(catalog, f"n{number:03}", 1)
    rows = 0

    def count(connection, cursor, statement, parameters, context, many):
        nonlocal rows
        assert "LIMIT" in statement or "adapters.name = " in statement
        rows += 1

    event.listen(Engine, "before_cursor_execute", count)
    try:
        with pytest.raises(AdapterNotFound, match="'n0150'; did you mean 'n015'"):
            catalog.resolve("n0150")
    finally:
        event.remove(Engine, "before_cursor_execute", count)
    assert rows <= 4


def test_the_same_content_again_changes_nothing(catalog):
    first = add(catalog, "bot", 1)
    changes = catalog.last_change()
    assert add(catalog, "bot", 1) == first
    assert catalog.last_change() == changes
    add(catalog, "bot", 2)
    catalog.set_alias("default", "bot", "prod", 2)
    assert add(catalog, "bot", 1).number == 1
    assert catalog.resolve("bot").number == 1  # `latest` is what was imported last
    assert catalog.resolve("bot@prod").number == 2
    assert [move.to_number for move in catalog.alias_history("default", "bot")] == [1, 2, 1]


def test_content_is_kept_once_for_all_adapters(catalog, database):
    for name in ("a", "b", "c"):
        add(catalog, name, "same")
    assert list(catalog.referenced_revisions()) == [content("same")]
    assert database.query("SELECT count(*) FROM adapter_revisions") == [(3,)]
    assert database.query("SELECT count(*) FROM manifests") == [(1,)]


def test_an_alias_moves_only_from_where_it_is_expected(catalog):
    for number in (1, 2, 3):
        add(catalog, "bot", number)
    catalog.set_alias("default", "bot", "prod", 1, expected=0)
    with pytest.raises(CatalogConflict, match="'prod' of 'bot' is at r1 and is not new"):
        catalog.set_alias("default", "bot", "prod", 2, expected=0)
    with pytest.raises(CatalogConflict, match="is at r1 and is not at r2"):
        catalog.set_alias("default", "bot", "prod", 3, expected=2)
    with pytest.raises(CatalogConflict, match="'canary' of 'bot' does not exist and is not at r2"):
        catalog.set_alias("default", "bot", "canary", 3, expected=2)
    moved = catalog.set_alias("default", "bot", "prod", 3, expected=1, by="ann")
    assert (moved.from_number, moved.to_number, moved.moved_by) == (1, 3, "ann")
    changes = catalog.last_change()
    assert catalog.set_alias("default", "bot", "prod", 3) == moved
    assert catalog.last_change() == changes
    assert catalog.show("default", "bot").aliases == {"latest": 3, "prod": 3}


def test_names_that_cannot_be(catalog):
    add(catalog, "bot", 1)
    for alias in ("r1", content(1), "a b", ""):
        with pytest.raises(InvalidReference):
            catalog.set_alias("default", "bot", alias, 1)
    with pytest.raises(InvalidReference):
        add(catalog, "a/b/c", 1)
    with pytest.raises(InvalidReference, match="is not a revision id"):
        catalog.add_revision("default", "bot", manifest(), "sha256:1", 1, stored_since=0)
    with pytest.raises(AdapterNotFound, match="no revision r7; its newest is r1"):
        catalog.set_alias("default", "bot", "prod", 7)
    with pytest.raises(ValueError, match="a page of 0 adapters"):
        catalog.list(limit=0)


def test_rollbacks_go_back_further_and_history_goes_on(catalog):
    for number in (1, 2, 3):
        add(catalog, "bot", number)
    assert catalog.rollback("default", "bot").to_number == 2
    assert catalog.rollback("default", "bot").to_number == 1
    with pytest.raises(CatalogConflict, match="'latest' of 'bot' has no revision before r1"):
        catalog.rollback("default", "bot")
    catalog.set_alias("default", "bot", "latest", 3)
    assert catalog.rollback("default", "bot", by="ann").to_number == 1
    history = catalog.alias_history("default", "bot")
    assert [(move.from_number, move.to_number) for move in reversed(history)] == [
        (None, 1),
        (1, 2),
        (2, 3),
        (3, 2),
        (2, 1),
        (1, 3),
        (3, 1),
    ]
    assert history[0].moved_by == "ann"
    assert catalog.alias_history("default", "bot", limit=2) == history[:2]
    with pytest.raises(AdapterNotFound, match="no alias 'prod'; it has 'latest'"):
        catalog.alias_history("default", "bot", "prod")
    with pytest.raises(AdapterNotFound, match="no adapter 'other'"):
        catalog.alias_history("default", "other")
    assert catalog.resolve("bot").number == 1
    with pytest.raises(AdapterNotFound, match="no alias 'prod'"):
        catalog.rollback("default", "bot", "prod")


def test_pages_are_the_list(catalog):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    generator = random.Random(seed)
    letters = "aZ09._-b"
    names = {"".join(["x", *generator.choices(letters, k=generator.randint(0, 4))]) for _ in range(60)}
    wanted = sorted((tenant, name) for name in names for tenant in generator.sample(["acme", "default", "Zoo"], 2))
    for tenant, name in wanted:
        add(catalog, name, f"{tenant}/{name}", tenant=tenant)

    def pages(**filters):
        found, after = [], None
        while page := catalog.list(after=after, limit=generator.randint(1, 20), **filters):
            found += [(entry.tenant, entry.name) for entry in page]
            after = found[-1]
        return found

    assert pages() == wanted
    assert pages(tenant="acme") == [each for each in wanted if each[0] == "acme"]
    for prefix in ("x", "xa", "xZ", "x.", "x-b", "q"):
        assert pages(prefix=prefix) == [each for each in wanted if each[1].startswith(prefix)]
        assert pages(tenant="Zoo", prefix=prefix) == [
            each for each in wanted if each[0] == "Zoo" and each[1].startswith(prefix)
        ]
    gone = wanted[::3]
    for tenant, name in gone:
        catalog.delete(tenant, name)
    assert pages() == [each for each in wanted if each not in gone]
    assert pages(deleted=True) == gone


def test_an_adapter_in_full(catalog):
    for number in range(1, 6):
        add(catalog, "bot", number, rank=number)
    catalog.set_alias("default", "bot", "prod", 2)
    details = catalog.show("default", "bot", limit=3)
    assert [each.number for each in details.revisions] == [5, 4, 3]
    assert (details.num_revisions, details.aliases) == (5, {"latest": 5, "prod": 2})
    summary = details.summary
    assert (summary.number, summary.revision_id, summary.kinds, summary.positions, summary.base_model) == (
        5,
        content(5),
        ("lora",),
        "prefill",
        "sha256:base",
    )
    assert catalog.list() == [summary]
    with pytest.raises(AdapterNotFound, match="did you mean 'bot'"):
        catalog.show("default", "bott")


def test_deleted_adapters_come_back_whole(catalog):
    add(catalog, "bot", 1)
    add(catalog, "bot", 2)
    catalog.set_alias("default", "bot", "prod", 1)
    catalog.delete("default", "bot")
    for change in (catalog.delete, catalog.rollback, catalog.show):
        with pytest.raises(AdapterNotFound, match="was deleted"):
            change("default", "bot")
    with pytest.raises(CatalogConflict, match=r"'bot' was deleted on .*; restore it first"):
        add(catalog, "bot", 3)
    assert list(catalog.referenced_revisions()) == sorted([content(1), content(2)])  # ascending, as fsck wants them
    catalog.restore("default", "bot")
    catalog.restore("default", "bot")
    assert catalog.resolve("bot").number == 2
    assert catalog.resolve("bot@prod").number == 1
    assert add(catalog, "bot", 3).number == 3
    with pytest.raises(AdapterNotFound, match="no adapter 'other'"):
        catalog.restore("default", "other")


class ClockAhead(datetime):
    """That of a machine on which it is ten days later."""

    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) + timedelta(days=10)


def test_a_wrong_clock_purges_nothing_early(catalog, database, monkeypatch):
    """On PostgreSQL, where catalogs have many machines: neither that of who deletes nor that of who collects counts."""
    week = timedelta(days=7)
    for name in ("right", "wrong"):
        add(catalog, name, name)
    catalog.delete("default", "right")
    with monkeypatch.context() as patched:
        patched.setattr(database_module, "datetime", ClockAhead)
        catalog.delete("default", "wrong")
        is_ahead = catalog.now() - datetime.now(UTC) > week
        purged_early = catalog.collect_garbage(catalog.now() - week)
    if database.kind == "sqlite":  # its only machine is wrong
        assert is_ahead
        assert purged_early == [content("right")]
        return
    assert not is_ahead
    assert purged_early == []
    assert catalog.collect_garbage(catalog.now()) == sorted([content("right"), content("wrong")])


def test_garbage_is_what_no_adapter_needs(catalog):
    add(catalog, "old", 1)
    add(catalog, "old", "shared")
    add(catalog, "live", "shared")
    add(catalog, "recent", 2)
    catalog.delete("default", "old")
    assert catalog.collect_garbage(datetime.now(UTC) - timedelta(hours=1)) == []
    between = datetime.now(UTC)
    catalog.delete("default", "recent")
    assert catalog.collect_garbage(between) == [content(1)]
    assert sorted(catalog.referenced_revisions()) == sorted([content("shared"), content(2)])
    assert catalog.collect_garbage(between) == [content(1)]  # until it is confirmed
    catalog.confirm_removed([content(1)])
    assert catalog.collect_garbage(between) == []
    with pytest.raises(AdapterNotFound, match=r"was deleted on .*; import it again"):
        catalog.restore("default", "old")
    assert add(catalog, "old", 3).number == 3  # r1 and r2 were other content
    with pytest.raises(AdapterNotFound, match="no revision r1"):
        catalog.resolve("old@r1")
    catalog.restore("default", "recent")
    assert catalog.resolve("recent").revision_id == content(2)


def test_content_that_is_being_removed_is_not_imported(catalog):
    def add_stored_since(since):
        return catalog.add_revision("default", "new", manifest(), content(1), 1, stored_since=since)

    add(catalog, "old", 1)
    catalog.delete("default", "old")
    before = catalog.last_change()
    assert catalog.collect_garbage(TOMORROW) == [content(1)]
    for since in (before, catalog.last_change()):
        with pytest.raises(RevisionBeingRemoved, match="was collected as garbage") as caught:
            add_stored_since(since)
        assert caught.value.retryable
    between = catalog.last_change()
    catalog.confirm_removed([content(1)])
    with pytest.raises(RevisionBeingRemoved):
        add_stored_since(between)
    with pytest.raises(AdapterNotFound, match="no adapter 'new'"):  # a refused import leaves nothing
        catalog.resolve("new")
    assert add_stored_since(catalog.last_change()).number == 1
    assert catalog.collect_garbage(TOMORROW) == []
    catalog.delete("default", "new")
    assert catalog.collect_garbage(TOMORROW) == [content(1)]


def test_everything_referenced_is_listed_page_by_page(catalog, monkeypatch):
    monkeypatch.setattr(catalog_module, "_FSCK_PAGE", 3)
    for number in range(7):
        add(catalog, f"a{number % 2}", number)
    assert list(catalog.referenced_revisions()) == sorted(map(content, range(7)))


def test_tables_of_an_early_release_are_brought_up_to_date(database):
    """Their content is stored, all of it; a process of that release, which knows no such column, goes on importing."""
    catalog = SqlCatalog.open(database.url)
    add(catalog, "old", 1)
    catalog.close()
    database.query("ALTER TABLE revisions DROP COLUMN stored")
    database.query("ALTER TABLE adapters DROP COLUMN shares_prefixes")
    for table in ("api_keys", "grants", "audit_events", "quota_members", "quota_pools", "quota_holdings"):
        database.query(f"DROP TABLE {table}")
    database.query("UPDATE alembic_version SET version_num = '0001'")
    catalog = SqlCatalog.open(database.url)
    assert catalog.resolve("old").stored
    columns = "revision_id, manifest_id, kinds, positions, base_model, bytes, created_at"
    database.query(f"INSERT INTO revisions ({columns}) SELECT '{content(2)}', {columns[13:]} FROM revisions")
    assert list(catalog.referenced_revisions()) == sorted([content(1), content(2)])
    with catalog._database.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    catalog.close()


def in_memory(catalog, name: str, number: int | str, alias: str = "latest", tenant: str = "default"):
    """A push of content that no store has."""
    return catalog.add_revision(
        tenant, name, manifest(), content(number), 1000, stored_since=None, by="test", moves_latest=False, alias=alias
    )


def test_content_that_is_in_memory_only(catalog):
    first = add(catalog, "bot", 1)
    before = catalog.last_change()
    second = in_memory(catalog, "bot", 2)
    assert (first.stored, second.stored, second.number) == (True, False, 2)
    assert catalog.resolve("bot") == second
    # Row and alias are one change: nobody sees the one without the other.
    assert [change.kind for change in catalog.changes_since(before)] == ["import"]
    assert catalog.alias_history("default", "bot")[0].from_number == 1
    assert [each.stored for each in catalog.show("default", "bot").revisions] == [False, True]
    assert not catalog.show("default", "bot").summary.stored
    assert not catalog.list()[0].stored
    assert list(catalog.referenced_revisions()) == [content(1)]  # the store need not have the other
    assert in_memory(catalog, "bot", 2) == second
    assert in_memory(catalog, "bot", 2, "train") == second
    assert catalog.show("default", "bot").aliases == {"latest": 2, "train": 2}
    assert in_memory(catalog, "new", 3, "train").number == 1
    assert catalog.show("default", "new").aliases == {"latest": 1, "train": 1}
    with pytest.raises(InvalidReference):
        in_memory(catalog, "bot", 4, "r4")
    catalog.delete("default", "bot")
    with pytest.raises(CatalogConflict):
        in_memory(catalog, "bot", 5)


def test_what_is_stored_stays_stored_and_what_is_not_can_be_stored_later(catalog):
    add(catalog, "bot", 1)
    assert in_memory(catalog, "bot", 1).stored
    assert in_memory(catalog, "other", 1).stored
    in_memory(catalog, "bot", 2)
    in_memory(catalog, "other", 2, tenant="acme")
    before = catalog.last_change()
    assert add(catalog, "bot", 2).stored
    changes = [(each.kind, each.tenant, each.name) for each in catalog.changes_since(before)]
    assert changes == [("stored", "default", "bot"), ("stored", "acme", "other")]  # whose routers must hear of it
    assert catalog.resolve("acme/other").stored
    assert list(catalog.referenced_revisions()) == sorted([content(1), content(2)])
    before = catalog.last_change()
    add(catalog, "bot", 2)
    assert catalog.last_change() == before


def test_garbage_in_memory_only(catalog):
    """Nothing is to be removed for it, whatever is done to the bytes beside it."""
    in_memory(catalog, "bot", 1)
    assert catalog.condemn(content(1))  # bytes that an import left before it could say so
    since = catalog.last_change()
    with pytest.raises(RevisionBeingRemoved):
        add(catalog, "bot", 1)
    assert catalog.collect_garbage(TOMORROW) == [content(1)]
    catalog.confirm_removed([content(1)])
    with pytest.raises(RevisionBeingRemoved):  # it had found the bytes that are gone now
        catalog.add_revision("default", "bot", manifest(), content(1), 1, stored_since=since)
    assert not catalog.resolve("bot").stored
    assert add(catalog, "bot", 1).stored
    assert not catalog.condemn(content(1))

    in_memory(catalog, "gone", 2)
    catalog.delete("default", "gone")
    assert catalog.collect_garbage(TOMORROW) == []
    assert add(catalog, "bot", 2).stored  # whose bytes nobody has removed
    in_memory(catalog, "gone", 3)
    in_memory(catalog, "bot", 3)
    catalog.delete("default", "bot")
    assert catalog.collect_garbage(TOMORROW) == sorted([content(1), content(2)])
    assert not catalog.resolve("gone").stored


def test_memory_only_content_comes_while_its_old_bytes_are_being_removed(catalog):
    add(catalog, "bot", 1)
    catalog.delete("default", "bot")
    assert catalog.collect_garbage(TOMORROW) == [content(1)]
    since = catalog.last_change()
    assert not in_memory(catalog, "bot", 1).stored  # it needs no bytes
    with pytest.raises(RevisionBeingRemoved):  # but who has found them in the store must not count on them
        catalog.add_revision("default", "bot", manifest(), content(1), 1, stored_since=since)
    catalog.confirm_removed([content(1)])
    with pytest.raises(RevisionBeingRemoved):
        catalog.add_revision("default", "bot", manifest(), content(1), 1, stored_since=since)
    assert add(catalog, "bot", 1).stored
    catalog.delete("default", "bot")
    assert catalog.collect_garbage(TOMORROW) == [content(1)]


def test_what_workers_must_keep_in_memory(catalog):
    ids = [content(number) for number in range(5)]
    add(catalog, "bot", 0)
    in_memory(catalog, "bot", 1)
    in_memory(catalog, "bot", 2)
    in_memory(catalog, "bot", 3, "train")
    assert catalog.kept_in_memory(ids) == {ids[0]: False, ids[1]: False, ids[2]: True, ids[3]: True}
    in_memory(catalog, "other", 1, tenant="acme")
    assert catalog.kept_in_memory(ids[:3]) == {ids[0]: False, ids[1]: True, ids[2]: True}
    catalog.delete("acme", "other")
    assert catalog.kept_in_memory(ids[:3]) == {ids[0]: False, ids[1]: False, ids[2]: True}
    catalog.set_alias("default", "bot", "train", 2)
    add(catalog, "bot", 2)
    assert catalog.kept_in_memory(ids) == {ids[0]: False, ids[1]: True, ids[2]: False, ids[3]: False}
    assert catalog.kept_in_memory([]) == {}
    many = [content(f"unknown {number}") for number in range(2500)] + [ids[1]]
    assert catalog.kept_in_memory(many) == {ids[1]: True}


def test_changes_in_order(catalog):
    add(catalog, "bot", 1)
    add(catalog, "bot", 1)
    add(catalog, "bot", 2, tenant="acme")
    catalog.set_alias("default", "bot", "prod", 1)
    catalog.delete("default", "bot")
    catalog.restore("default", "bot")
    catalog.delete("default", "bot")
    catalog.confirm_removed(catalog.collect_garbage(TOMORROW))
    found = catalog.changes_since(0)
    assert [(each.sequence, each.kind, each.tenant, each.name) for each in found] == [
        (1, "import", "default", "bot"),
        (2, "import", "acme", "bot"),
        (3, "alias", "default", "bot"),
        (4, "delete", "default", "bot"),
        (5, "restore", "default", "bot"),
        (6, "delete", "default", "bot"),
        (7, "purge", "default", "bot"),
        (8, "removed", None, None),
    ]
    assert catalog.changes_since(5, limit=2) == found[5:7]
    assert catalog.changes_since(8) == []
    assert catalog.last_change() == 8


def test_waiting_for_a_change(catalog, database):
    """By another process's catalog."""
    started = time.monotonic()
    assert catalog.wait_for_change(0, 0.2) == 0
    assert 0.2 <= time.monotonic() - started < 5
    other = SqlCatalog(database.url)
    add(other, "bot", 0)
    assert catalog.wait_for_change(0, 10) == 1  # it has happened already
    for sequence in range(1, 4):
        seen: list[float] = []

        def wait(sequence=sequence, seen=seen):
            assert catalog.wait_for_change(sequence, 10) == sequence + 1
            seen.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        add(other, "bot", sequence)
        committed = time.monotonic()
        thread.join()
        assert seen[0] - committed < 0.3
    other.close()


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
    monkeypatch.setattr(engines, "LOCK_TIMEOUT_S", 0.05)
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
            lambda: catalog.wait_for_change(0, 1),
            lambda: list(catalog.referenced_revisions()),
        ):
            with pytest.raises(CatalogUnavailable, match="does not answer") as caught:
                use()
            assert (caught.value.http_status, caught.value.retryable) == (503, True)
    assert catalog.resolve("bot").number == 1
    assert add(catalog, "bot", 2).number == 2


def test_a_database_that_goes_down_while_we_wait(catalog, database):
    failed: list[Exception] = []

    def wait():
        try:
            catalog.wait_for_change(0, 10)
        except CatalogUnavailable as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    with database.down(catalog):
        thread.join(timeout=5)
        assert len(failed) == 1
    add(catalog, "bot", 1)
    assert catalog.wait_for_change(0, 5) == 1


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
        catalog._database.transact(work)
    assert times == 1


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
    with catalog._database.connect() as connection:
        for name, value in wanted[database.kind].items():
            query = f"PRAGMA {name}" if database.kind == "sqlite" else f"SHOW {name}"
            assert connection.exec_driver_sql(query).scalar() == value


def test_old_changes_are_forgotten(catalog, monkeypatch):
    monkeypatch.setattr(database_module, "KEPT_CHANGES", 5)
    monkeypatch.setattr(database_module, "_TRIM_EVERY", 4)
    monkeypatch.setattr(database_module, "_MOST_TRIMMED", 3)
    for number in range(1, 24):
        add(catalog, "bot", number)
        sequences = [change.sequence for change in catalog.changes_since(0)]
        assert sequences == list(range(sequences[0], number + 1))
        assert len(sequences) >= min(number, 5)  # the newest are kept
    # Trimmed at 4, 8, 12, 16 and 20, three at a time at most.
    assert sequences[0] == 13
    assert [change.sequence for change in catalog.changes_since(20)] == [21, 22, 23]
    assert len(catalog.alias_history("default", "bot")) == 23  # this is not the history of the aliases
    assert catalog.rollback("default", "bot").to_number == 22
