"""References resolved from memory, in step with the catalog."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
from support.adapters.catalog_databases import add, content

from adapters.catalog import cached
from adapters.catalog.cached import CachedResolver
from adapters.catalog.records import AdapterRevision
from adapters.catalog.sql import SqlCatalog
from adapters.errors import AdapterNotFound, CatalogUnavailable, InvalidReference
from adapters.identity import AdapterReference


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class CountingCatalog:
    """A catalog that counts what it resolves and can do something just before it answers."""

    def __init__(self, catalog: SqlCatalog):
        self._catalog = catalog
        self.num_resolved = 0
        self.before_answer: Callable[[], None] = lambda: None
        self.last_change = catalog.last_change
        self.changes_since = catalog.changes_since
        self.wait_for_change = catalog.wait_for_change

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
    return Clock()


@pytest.fixture
def resolver(counting, clock):
    """One that takes changes in when it is told to."""
    made = CachedResolver(counting, max_entries=8, clock=clock)
    made.refresh()
    return made


WITHIN_S = 30.0  # on a machine that stalls


def until(condition: Callable[[], bool], timeout_s: float) -> float:
    """How long it took, in seconds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s} s"
        time.sleep(0.005)
    return time.monotonic() - started


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


@pytest.mark.parametrize("num_forgotten", [1, 2])
def test_changes_that_were_forgotten_empty_the_cache(num_forgotten, catalog, database, resolver):
    """The first of two that this resolver has not taken in, and both."""
    add(catalog, "bot", 1)
    resolver.refresh()
    assert resolver.resolve("bot").number == 1
    add(catalog, "bot", 2)
    add(catalog, "other", 2)
    database.query(f"DELETE FROM changes WHERE sequence <= {1 + num_forgotten}")
    resolver.refresh()
    assert resolver.lookup("bot") is None
    assert resolver.resolve("bot").number == 2
    add(catalog, "other", 3)
    resolver.refresh()
    assert resolver.lookup("bot") is not None  # in step again: only what changed goes


def test_a_catalog_that_went_back_empties_the_cache(catalog, database, resolver):
    add(catalog, "bot", 1)
    resolver.refresh()
    resolver.resolve("bot")
    database.query("UPDATE change_counter SET last = 0")
    resolver.refresh()
    assert resolver.lookup("bot") is None


def test_while_the_catalog_is_down(catalog, database, counting, resolver, clock):
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
    assert resolver.staleness_s < 1
    add(catalog, "bot", 2)
    resolver.refresh()
    assert resolver.resolve("bot").number == 2


def test_the_log_says_when_the_catalog_goes_and_comes_back(catalog, database, resolver, clock, caplog):
    def said() -> list[tuple[str, str]]:
        return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == cached.__name__]

    gone = ("WARNING", "catalog unreachable, serving cached names")
    back = ("WARNING", "catalog reachable again")
    with caplog.at_level("INFO"):
        resolver.refresh()
        assert said() == []
        with database.down(catalog):
            for _ in range(3):
                with pytest.raises(CatalogUnavailable):
                    resolver.refresh()
                clock.now += 20
            assert said() == [gone]  # once
            assert "does not answer" in caplog.records[-1].fields["reason"]
        resolver.refresh()
        resolver.refresh()
        assert said() == [gone, back]
        assert caplog.records[-1].fields == {"unreachable_s": 60.0}
        with database.down(catalog), pytest.raises(CatalogUnavailable):
            resolver.refresh()
        assert said() == [gone, back, gone]


def test_without_word_from_the_catalog_nothing_is_kept(catalog, counting):
    add(catalog, "bot", 1)
    resolver = CachedResolver(counting)
    assert resolver.staleness_s > 1
    assert resolver.resolve("bot") == resolver.resolve("bot")
    assert counting.num_resolved == 2


def test_a_moved_alias_is_seen_within_a_second(catalog, database):
    """Moved by another process, five times; the median, since machines stall."""
    add(catalog, "bot", 1)
    add(catalog, "bot", 2)
    other = SqlCatalog(database.url)
    with CachedResolver(catalog) as resolver:
        until(lambda: resolver.staleness_s < 1, WITHIN_S)
        took_s = []
        for number in (1, 2, 1, 2, 1):
            other.set_alias("default", "bot", "prod", number)
            took_s.append(until(lambda number=number: _number(resolver, "bot@prod") == number, WITHIN_S))
        assert statistics.median(took_s) < 1, took_s
    other.close()


def _number(resolver: CachedResolver, reference: str) -> int | None:
    try:
        return resolver.resolve(reference).number
    except AdapterNotFound:
        return None


def test_what_nobody_expected_does_not_end_the_following(catalog, counting):
    first, second = add(catalog, "bot", 1), add(catalog, "other", 2)
    failures = iter([RuntimeError("a defect"), RuntimeError("again")])

    def fails_twice() -> int:
        if failure := next(failures, None):
            raise failure
        return catalog.last_change()

    counting.last_change = fails_twice
    with CachedResolver(counting) as resolver:
        until(lambda: resolver.staleness_s < 1, WITHIN_S)
        assert resolver.resolve("bot") == first
        assert resolver.resolve("other") == second
        until(lambda: resolver.staleness_s < 1, WITHIN_S)
        catalog.delete("default", "bot")
        until(lambda: resolver.lookup("bot") is None, WITHIN_S)
