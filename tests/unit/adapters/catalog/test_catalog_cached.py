"""References resolved from memory, in step with the catalog."""

from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace

import pytest
from support.adapters.catalog_databases import add, content
from support.held_calls import failing
from support.waiting import wait_until

from adapters.catalog.records import AdapterRevision
from adapters.catalog.sql import SqlCatalog, cached
from adapters.catalog.sql.cached import CachedResolver
from adapters.errors import AdapterNotFound, CatalogUnavailable, InvalidReference
from adapters.identity import AdapterReference


class CountingCatalog:
    """A catalog that counts what it resolves and can do something just before it answers."""

    def __init__(self, catalog: SqlCatalog):
        self._catalog = catalog
        self.num_resolved = 0
        self.before_answer: Callable[[], None] = lambda: None
        self.last_change = catalog.last_change
        self.changes_since = catalog.changes_since

    def resolve_parsed(self, wanted: AdapterReference) -> AdapterRevision:
        self.num_resolved += 1
        try:
            return self._catalog.resolve_parsed(wanted)
        finally:
            self.before_answer()


@pytest.fixture
def counting(catalog):
    return CountingCatalog(catalog)


@pytest.fixture
def clock():
    """It stands still until it is set."""
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def resolver(counting, clock):
    """One that takes changes in when it is told to."""
    made = CachedResolver(counting, max_entries=8, clock=lambda: clock.now)
    made.refresh()
    return made


def test_what_was_resolved_is_kept(catalog, counting, resolver):
    first = add(catalog, "bot", 1)
    resolver.refresh()
    for reference in ("bot", "bot@r1", f"bot@{content(1)}", "default/bot"):
        assert resolver.lookup(reference) is None
        assert resolver.resolve(reference) == resolver.resolve(reference) == resolver.lookup(reference) == first
    assert counting.num_resolved == 4


def test_what_is_not_there_is_kept_too(catalog, counting, resolver):
    for _ in range(3):
        with pytest.raises(AdapterNotFound, match="there is no adapter 'bot'"):
            resolver.resolve("bot")
    assert counting.num_resolved == 1
    add(catalog, "bot", 1)
    resolver.refresh()
    assert resolver.resolve("bot").number == 1
    with pytest.raises(InvalidReference):
        resolver.resolve("a b")


def test_a_change_concerns_its_adapter_only(catalog, counting, resolver):
    for tenant, name in (("default", "bot"), ("acme", "bot"), ("default", "other")):
        add(catalog, name, 1, tenant=tenant)
        add(catalog, name, 2, tenant=tenant)
    resolver.refresh()
    references = ("bot", "bot@latest", "acme/bot", "other")
    for reference in references:
        resolver.resolve(reference)
    for change, expected in (
        (lambda: catalog.rollback("default", "bot"), 1),
        (lambda: catalog.set_alias("default", "bot", "latest", 2), 2),
        (lambda: add(catalog, "bot", 3), 3),
    ):
        before = counting.num_resolved
        change()
        resolver.refresh()
        assert [resolver.resolve(reference).number for reference in references] == [expected, expected, 2, 2]
        assert counting.num_resolved == before + 2
    catalog.delete("default", "bot")
    resolver.refresh()
    with pytest.raises(AdapterNotFound, match="was deleted"):
        resolver.resolve("bot")
    catalog.restore("default", "bot")
    resolver.refresh()
    assert resolver.resolve("bot").number == 3
    assert resolver.resolve("acme/bot").number == 2
    catalog.tenants.remove("acme")
    resolver.refresh()
    with pytest.raises(AdapterNotFound):
        resolver.resolve("acme/bot")


def test_an_answer_from_before_a_change_is_not_kept(catalog, counting, resolver):
    """The catalog is asked, the alias moves, the change is taken in, and only then the answer arrives."""
    add(catalog, "bot", 1)
    resolver.refresh()

    def move() -> None:
        counting.before_answer = lambda: None
        add(catalog, "bot", 2)
        resolver.refresh()

    counting.before_answer = move
    assert resolver.resolve("bot").number == 1
    assert resolver.resolve("bot").number == 2


def test_the_least_recently_used_goes_first(catalog, counting, resolver):
    for number in range(10):
        add(catalog, f"a{number}", number)
    resolver.refresh()
    for number in range(8):
        resolver.resolve(f"a{number}")
    resolver.resolve("a0")
    resolver.resolve("a8")
    assert counting.num_resolved == 9
    assert resolver.lookup("a0") is not None
    assert resolver.lookup("a1") is None
    for number in range(100):  # what stands for nothing does not crowd out what stands for something
        with pytest.raises(AdapterNotFound):
            resolver.resolve(f"nothing{number}")
    assert resolver.lookup("a0") is not None
    assert len(resolver._found._references) == 8
    assert len(resolver._not_found._references) == 2


def test_very_many_changes_empty_the_cache(catalog, counting, resolver, monkeypatch):
    monkeypatch.setattr(cached, "_MAX_CHANGES", 3)
    add(catalog, "bot", 1)
    resolver.refresh()
    resolver.resolve("bot")
    for number in range(5):
        add(catalog, "other", number)
    add(catalog, "bot", 2)
    resolver.refresh()
    assert resolver.lookup("bot") is None
    assert resolver.resolve("bot").number == 2


@pytest.mark.parametrize(
    "happens",
    [
        ["DELETE FROM changes WHERE sequence <= 2"],  # the first of two that this resolver has not taken in
        ["DELETE FROM changes WHERE sequence <= 3"],  # both
        ["DELETE FROM changes", "UPDATE change_counter SET last = 0"],  # the catalog goes back, as to a backup
    ],
)
def test_changes_that_are_not_known_empty_the_cache(happens, catalog, database, resolver):
    add(catalog, "bot", 1)
    resolver.refresh()
    assert resolver.resolve("bot").number == 1
    add(catalog, "bot", 2)
    add(catalog, "other", 2)
    for sql in happens:
        database.query(sql)
    resolver.refresh()
    assert resolver.lookup("bot") is None
    assert resolver.resolve("bot").number == 2
    add(catalog, "other", 3)
    resolver.refresh()
    assert resolver.lookup("bot") is not None  # in step again: only what changed goes


def test_while_the_catalog_is_down(catalog, database, counting, resolver, clock, caplog):
    add(catalog, "bot", 1)
    resolver.refresh()
    known = ("bot", "bot@r1", f"bot@{content(1)}")
    bot = resolver.resolve("bot")
    assert [resolver.resolve(reference) for reference in known] == [bot, bot, bot]
    assert resolver.staleness_s < 1
    with database.down(catalog):
        with pytest.raises(CatalogUnavailable):
            resolver.refresh()
        clock.now += 2
        assert resolver.staleness_s > 1
        assert resolver.resolve("bot") == bot
        before = counting.num_resolved
        with pytest.raises(CatalogUnavailable, match="'other' cannot be resolved"):
            resolver.resolve("other")
        assert counting.num_resolved == before  # it did not wait for the database to fail again
        for _ in range(3):  # known names go on, however long it lasts
            clock.now += 30 * 86400
            assert [resolver.resolve(reference) for reference in known] == [bot, bot, bot]
            with pytest.raises(CatalogUnavailable):
                resolver.refresh()
        assert resolver.staleness_s == 2 + 90 * 86400
    resolver.refresh()
    resolver.refresh()
    assert resolver.staleness_s < 1
    gone, back = (record for record in caplog.records if record.name == cached.__name__)  # each is said once
    assert "catalog unreachable" in gone.getMessage()
    assert "does not answer" in gone.fields["reason"]
    assert "reachable again" in back.getMessage()
    assert back.fields == {"unreachable_s": 2.0 + 90 * 86400}
    add(catalog, "bot", 2)
    resolver.refresh()
    assert resolver.resolve("bot").number == 2


def test_without_word_from_the_catalog_nothing_is_kept(catalog, counting):
    add(catalog, "bot", 1)
    resolver = CachedResolver(counting)
    assert resolver.staleness_s > 1
    assert resolver.resolve("bot") == resolver.resolve("bot")
    assert counting.num_resolved == 2


def test_changes_of_other_processes_are_followed_whatever_happens(catalog, database, counting, monkeypatch):
    first, second = add(catalog, "bot", 1), add(catalog, "bot", 2)
    failing(monkeypatch, counting, "last_change", RuntimeError("a defect"), times=2)
    other = SqlCatalog(database.url)
    resolver = CachedResolver(counting)
    resolver.start()
    with closing(resolver):
        wait_until(lambda: resolver.staleness_s < 1)
        assert resolver.resolve("bot") == second
        other.set_alias("default", "bot", "latest", 1)
        wait_until(lambda: resolver.lookup("bot") is None)
        assert resolver.resolve("bot") == first
    other.close()
