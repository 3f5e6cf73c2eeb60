"""Deletion, restoring and garbage collection in the catalog."""

from datetime import UTC, datetime, timedelta

import pytest
from support.adapters.catalog_databases import TOMORROW, add, content, manifest

from adapters.catalog.sql import catalog as catalog_module
from adapters.catalog.sql import database as database_module
from adapters.errors import AdapterNotFound, CatalogConflict, RevisionBeingRemoved


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
