"""Aliases that are split over two revisions, in SQLite and in PostgreSQL."""

import pytest
from support.adapters.catalog_databases import TOMORROW, add, content, manifest

from adapters.catalog.records import AliasTarget
from adapters.catalog.sql import SqlCatalog, writing
from adapters.catalog.sql.tenants import CatalogQuota
from adapters.errors import CatalogConflict, TenantFull
from adapters.identity import AdapterReference

FEW = AliasTarget.split([(1, 95), (2, 5)])
MORE = AliasTarget.split([(2, 20), (1, 80)])
PROD = AdapterReference("default", "bot", "prod")


@pytest.fixture
def bot(catalog: SqlCatalog) -> SqlCatalog:
    """A catalog with three revisions of `bot`, whose alias `prod` is split over the first two."""
    for number in (1, 2, 3):
        add(catalog, "bot", number)
    catalog.set_alias("default", "bot", "prod", 1)
    catalog.set_alias("default", "bot", "prod", FEW, by="ann")
    return catalog


def test_every_move_is_in_the_history_and_is_rolled_back(bot):
    assert bot.set_alias("default", "bot", "prod", MORE).origin == FEW
    bot.set_alias("default", "bot", "prod", 2)
    assert bot.show("default", "bot").splits == {}
    for before in (MORE, FEW, AliasTarget(1)):
        moved = bot.rollback("default", "bot", "prod", by="bob")
        assert (moved.target, moved.moved_by) == (before, "bob")
        assert (bot.show("default", "bot").splits or {"prod": AliasTarget(1)}) == {"prod": before}
    with pytest.raises(CatalogConflict, match="'prod' of 'bot' has no revision before r1"):
        bot.rollback("default", "bot", "prod")
    moves = bot.alias_history("default", "bot", "prod")
    one, two = AliasTarget(1), AliasTarget(2)
    assert [move.target for move in moves] == [one, FEW, MORE, two, MORE, FEW, one]
    assert [move.origin for move in moves] == [FEW, MORE, two, MORE, FEW, one, None]


def test_a_split_ends_with_any_move_to_one_revision(bot):
    changes = bot.last_change()
    assert bot.set_alias("default", "bot", "prod", FEW).moved_by == "ann"  # the move that brought it there
    assert bot.last_change() == changes
    bot.set_alias("default", "bot", "prod", 1)  # which is the older one
    assert bot.resolve("bot@prod").number == 1
    bot.set_alias("default", "bot", "prod", FEW)
    bot.add_revision("default", "bot", manifest(), content(1), 1, stored_since=bot.last_change(), alias="prod")
    assert bot.resolve("bot@prod").number == 1
    assert bot.changes_since(changes + 2)[0].kind == "alias"  # which routers hear of


@pytest.mark.parametrize("weights", [[(1, 100), (2, 0)], [(1, -1), (2, 101)]])
def test_weights_that_cannot_be(weights):
    with pytest.raises(ValueError, match="in whole percent from 1 to 99"):
        AliasTarget.split(weights)


def test_both_revisions_stay(bot, database):
    in_memory = ("default", "bot", manifest())
    bot.add_revision(*in_memory, content(4), 1, stored_since=None, moves_latest=False)
    bot.set_alias("default", "bot", "prod", AliasTarget.split([(3, 1), (4, 99)]))
    assert bot.kept_in_memory([content(3), content(4)]) == {content(3): False, content(4): True}
    bot.add_revision(*in_memory, content(5), 1, stored_since=None, moves_latest=False)
    with pytest.raises(TenantFull, match=r"may have 1 pins .* would have 2"):
        bot.set_alias("default", "bot", "prod", AliasTarget.split([(4, 1), (5, 99)]), quota=CatalogQuota(pins=1))
    bot.set_alias("default", "bot", "prod", FEW)
    assert bot.kept_in_memory([content(4)]) == {content(4): False}

    bot.delete("default", "bot")
    assert bot.collect_garbage(TOMORROW.replace(year=2000)) == []
    bot.restore("default", "bot")
    assert bot.resolve_parsed(PROD).split.target == FEW
    assert {content(1), content(2)} <= set(bot.referenced_revisions())
    bot.delete("default", "bot")
    assert {content(1), content(2)} <= set(bot.collect_garbage(TOMORROW))
    assert database.query("SELECT count(*) FROM alias_splits") == [(0,)]


def test_nothing_is_left_of_a_removed_tenant_or_of_moves_that_are_trimmed(bot, database, monkeypatch):
    monkeypatch.setattr(writing, "KEPT_MOVES", 2)
    monkeypatch.setattr(writing, "_TRIM_AT", 2)
    for target in (MORE, FEW, MORE):
        bot.set_alias("default", "bot", "prod", target)
    assert database.query("SELECT count(*) FROM alias_splits") == [(2,)]
    assert [move.origin for move in bot.alias_history("default", "bot", "prod")] == [FEW, MORE]
    bot.tenants.remove("default")
    assert sum(bot.tenants.remains("default").values()) == 0
    assert database.query("SELECT count(*) FROM alias_splits") == [(0,)]


def test_releases_that_know_no_splits(bot, database):
    """They serve the older revision, and what they change is as they mean it: they write only the tables they know."""
    assert database.query("SELECT number FROM aliases WHERE alias = 'prod'") == [(1,)]
    assert database.query("SELECT version_num FROM alembic_version") == [("0007",)]
    sequence = bot.last_change() + 1
    columns = "adapter_id, alias, sequence, from_number, to_number, before, moved_at"
    for statement in (
        f"INSERT INTO changes SELECT {sequence}, 'alias', id, created_at FROM adapters",
        f"UPDATE change_counter SET last = {sequence}",
        f"INSERT INTO alias_moves ({columns}) SELECT adapter_id, alias, {sequence}, number, 1, move, "
        "(SELECT created_at FROM adapters) FROM aliases WHERE alias = 'prod'",
        f"UPDATE aliases SET move = {sequence} WHERE alias = 'prod'",
    ):
        database.query(f"{statement} RETURNING 1")
    assert bot.resolve("bot@prod").number == 1
    assert bot.rollback("default", "bot", "prod").target == FEW
    database.query("DELETE FROM aliases RETURNING 1")  # a tenant or an adapter goes, and leaves its splits
    for table in ("alias_moves", "adapter_revisions", "changes", "adapters"):
        database.query(f"DELETE FROM {table} RETURNING 1")

    database.query("DROP TABLE alias_splits")
    opened = SqlCatalog.open(database.url)  # of a catalog that 0.1.0 made
    add(opened, "new", 1)
    add(opened, "new", 2)
    assert opened.set_alias("default", "new", "prod", FEW).target == FEW
    opened.close()
