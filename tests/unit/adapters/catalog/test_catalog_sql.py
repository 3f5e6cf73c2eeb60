"""The catalog in SQLite and in PostgreSQL."""

import random
from datetime import UTC, datetime

import pytest
from sqlalchemy import Engine, event, text
from support.adapters.catalog_databases import TOMORROW, add, content, manifest

from adapters.catalog.records import AliasTarget
from adapters.catalog.sql import database as database_module
from adapters.catalog.sql import writing
from adapters.errors import AdapterNotFound, CatalogConflict, InvalidReference
from adapters.identity import AdapterReference


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


def test_aliases_of_an_adapter_are_bounded(catalog, monkeypatch):
    monkeypatch.setattr(writing, "MAX_ALIASES", 3)
    add(catalog, "bot", 1)
    add(catalog, "bot", 2)
    for alias in ("a", "b"):
        catalog.set_alias("default", "bot", alias, 1)
    with pytest.raises(CatalogConflict, match="the adapter has 3 aliases, which is the most"):
        catalog.set_alias("default", "bot", "c", 1)
    catalog.set_alias("default", "bot", "b", 2)  # those that there are can be moved
    assert catalog.show("default", "bot").aliases == {"a": 1, "b": 2, "latest": 2}
    assert len(catalog.alias_history("default", "bot", "b")) == 2
    add(catalog, "other", 1)
    catalog.set_alias("default", "other", "c", 1)  # it has its own


def test_queries_read_indexes_only_and_resolving_is_one(catalog, database):
    for number in range(20):
        add(catalog, f"a{number}", number)
    add(catalog, "a4", 5)
    catalog.set_alias("default", "a4", "prod", AliasTarget.split([(1, 95), (2, 5)]))
    catalog.resolve("a0")
    queries: list[tuple[str, object]] = []

    def note(connection, cursor, statement, parameters, context, many):
        queries.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        for reference in ("a3", "a3@r1", f"a3@{content(3)}"):
            catalog.resolve(reference)
        assert catalog.resolve_parsed(AdapterReference("default", "a4", "prod")).split is not None
        assert len(queries) == 4
        catalog.list(after=("default", "a3"), limit=3)
        catalog.list("default", prefix="a", after=("default", "a3"), limit=3)
        catalog.resolve("a0")
        with pytest.raises(AdapterNotFound):
            catalog.resolve("a100")
        assert len(queries) == 6 + 1 + 2
        catalog.kept_in_memory([content(3)])
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    explain = {"sqlite": "EXPLAIN QUERY PLAN ", "postgres": "EXPLAIN "}[database.kind]
    with catalog._reads.connect() as connection:
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
        ("qqq", "no adapter 'qqq'; `prelude adapters list` shows the names$"),
        ("acme/support-bot", "no adapter 'acme/support-bot'; "),  # another tenant's names are not told
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


def test_an_alias_keeps_its_newest_moves_and_rolls_back_among_them(catalog, database, monkeypatch):
    monkeypatch.setattr(writing, "KEPT_MOVES", 6)
    monkeypatch.setattr(writing, "_TRIM_AT", 8)
    for number in range(1, 11):
        add(catalog, "bot", number)
        catalog.set_alias("default", "bot", "prod", number)
        assert database.query("SELECT count(*) FROM alias_moves WHERE alias = 'prod'")[0][0] <= 8
    moves = catalog.alias_history("default", "bot", "prod")
    assert [each.to_number for each in moves] == list(range(10, 10 - len(moves), -1))
    assert len(moves) >= 6
    for number in (9, 8, 7):
        assert catalog.rollback("default", "bot", "prod").to_number == number
    for _ in range(8):  # they add moves, before which the older ones go
        catalog.set_alias("default", "bot", "prod", 1)
        catalog.set_alias("default", "bot", "prod", 2)
    for number in (1, 2, 1):
        assert catalog.rollback("default", "bot", "prod").to_number == number

    def roll_back_to_the_beginning() -> None:
        for _ in range(9):
            catalog.rollback("default", "bot", "prod")

    with pytest.raises(CatalogConflict, match="has no revision before"):
        roll_back_to_the_beginning()


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
    assert [move.from_number for move in reversed(history)] == [None, 1, 2, 3, 2, 1, 3]
    assert [move.to_number for move in reversed(history)] == [1, 2, 3, 2, 1, 3, 1]
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
    assert (summary.number, summary.revision_id) == (5, content(5))
    assert (summary.kinds, summary.positions, summary.base_model) == (("lora",), "prefill", "sha256:base")
    assert catalog.list() == [summary]
    with pytest.raises(AdapterNotFound, match="no adapter 'bott'"):
        catalog.show("default", "bott")


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
    assert [each.sequence for each in found] == list(range(1, 9))
    kinds = ["import", "import", "alias", "delete", "restore", "delete", "purge", "removed"]
    assert [each.kind for each in found] == kinds
    names = [("default", "bot"), ("acme", "bot"), *[("default", "bot")] * 5, (None, None)]
    assert [(each.tenant, each.name) for each in found] == names
    assert catalog.changes_since(5, limit=2) == found[5:7]
    assert catalog.changes_since(8) == []
    assert catalog.last_change() == 8


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
