"""Revisions that are in workers' memory only, as the catalog has them."""

from functools import partial

import pytest
from sqlalchemy import func, select
from support.adapters.catalog_databases import TOMORROW, add, content, manifest

from adapters.catalog.records import AliasTarget
from adapters.catalog.sql.tables import adapter_revisions, alias_moves, alias_splits, aliases, revisions
from adapters.errors import AdapterNotFound, CatalogConflict, InvalidReference, RevisionBeingRemoved


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


def rows(catalog) -> dict[str, int]:
    tables = (aliases, alias_moves, alias_splits, adapter_revisions, revisions)

    def counted(connection) -> dict[str, int]:
        return {each.name: connection.execute(select(func.count()).select_from(each)).scalar_one() for each in tables}

    return catalog.read(counted)


def test_many_aliases_that_come_and_go_leave_nothing(catalog):
    """Of an adapter of their own, and beside stored revisions."""
    add(catalog, "bot", 0)
    before = rows(catalog)
    for number in range(1, 101):
        for name in ("bot", "train"):
            in_memory(catalog, name, number, f"sampler-{number}")
            if number > 2:  # so that the first, which `latest` is made with, goes before others
                assert catalog.remove_alias("default", name, f"sampler-{number - 2}") in (content(number - 2), None)
    assert catalog.show("default", "train").aliases == {"latest": 99, "sampler-99": 99, "sampler-100": 100}
    for name in ("bot", "train"):
        for number in (99, 100):
            catalog.remove_alias("default", name, f"sampler-{number}")
    assert rows(catalog) == before
    with pytest.raises(AdapterNotFound):
        catalog.show("default", "train")
    assert in_memory(catalog, "train", 1, "again").number == 101
    assert catalog.collect_garbage(TOMORROW) == []


def test_an_alias_takes_no_revision_along_that_something_else_needs(catalog):
    remove = partial(catalog.remove_alias, "default", "bot")
    in_memory(catalog, "bot", 1, "a")
    in_memory(catalog, "bot", 1, "b")  # the same weights
    in_memory(catalog, "bot", 2, "c")
    assert remove("a") is None
    assert catalog.show("default", "bot").aliases == {"latest": 1, "b": 1, "c": 2}
    assert catalog.alias_history("default", "bot")[0].to_number == 1
    assert remove("b") == content(1)
    assert catalog.show("default", "bot").aliases == {"latest": 2, "c": 2}
    catalog.add_revision(
        "default", "bot", manifest(), content(3), 1, stored_since=catalog.last_change(), moves_latest=False, alias="v1"
    )
    in_memory(catalog, "bot", 3, "d")
    assert remove("d") is None
    catalog.set_alias("default", "bot", "latest", 3)
    assert remove("c") == content(2)
    assert catalog.show("default", "bot").aliases == {"latest": 3, "v1": 3}
    with pytest.raises(CatalogConflict):  # what it was at before is gone
        catalog.rollback("default", "bot")
    assert remove("v1") is None  # of a stored revision goes the alias only
    add(catalog, "bot", 5)  # at `latest`, from where a push of what is stored takes its number
    in_memory(catalog, "bot", 3, "e")
    assert remove("e") is None
    assert catalog.resolve(f"bot@{content(3)}").number == 3
    for alias, error in (("v1", AdapterNotFound), ("latest", InvalidReference), ("r3", InvalidReference)):
        with pytest.raises(error):
            remove(alias)
    in_memory(catalog, "other", 4, "x")
    in_memory(catalog, "bot", 4, "x")
    remove("x")
    assert catalog.kept_in_memory([content(4)]) == {content(4): True}


def test_a_revision_of_a_split_alias_stays_and_no_rollback_returns_to_one_that_is_gone(catalog):
    remove = partial(catalog.remove_alias, "default", "bot")
    add(catalog, "bot", 1)
    in_memory(catalog, "bot", 2, "new")
    split = AliasTarget.split([(1, 90), (2, 10)])
    catalog.set_alias("default", "bot", "prod", 1)
    catalog.set_alias("default", "bot", "prod", split)
    with pytest.raises(CatalogConflict, match="is split"):
        remove("prod")
    assert remove("new") is None
    assert catalog.show("default", "bot").splits == {"prod": split}
    catalog.set_alias("default", "bot", "prod", 1)
    in_memory(catalog, "bot", 2, "new")
    assert remove("new") == content(2)
    with pytest.raises(CatalogConflict, match="no revision before r1"):
        catalog.rollback("default", "bot", "prod")
    catalog.remove_alias("default", "bot", "prod")
    assert rows(catalog)["alias_splits"] == 0
