"""Revisions that are in workers' memory only, as the catalog has them."""

import pytest
from support.adapters.catalog_databases import TOMORROW, add, content, manifest

from adapters.errors import CatalogConflict, InvalidReference, RevisionBeingRemoved


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
