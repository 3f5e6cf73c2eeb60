"""Many at once on one catalog. Each thread has connections of its own, as a process would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.adapters.catalog_databases import CatalogDatabase, content, manifest

from adapters.catalog.sql import SqlCatalog
from adapters.errors import CatalogConflict

pytestmark = pytest.mark.slow

NUM_THREADS = 16


@pytest.fixture
def at_once(catalog: SqlCatalog, database: CatalogDatabase):
    """Runs work(number, catalog) in as many threads as there are kinds of work, begun together; their results."""

    def run(*works: Callable[[int, SqlCatalog], object]) -> list[object]:
        barrier = threading.Barrier(len(works))

        def one(number: int) -> object:
            own = SqlCatalog(database.url, max_connections=2)
            try:
                barrier.wait()
                return works[number](number, own)
            finally:
                own.close()

        with ThreadPoolExecutor(len(works)) as pool:
            return list(pool.map(one, range(len(works))))

    return run


def test_of_many_that_expect_the_same_one_moves(catalog, at_once):
    for number in range(NUM_THREADS + 1):
        catalog.add_revision("default", "bot", manifest(), content(number), 1, stored_since=0)

    def move(number: int, own: SqlCatalog) -> bool:
        try:
            own.set_alias("default", "bot", "prod", number + 1, expected=0)
        except CatalogConflict:
            return False
        return True

    assert sum(at_once(*[move] * NUM_THREADS)) == 1
    assert len(catalog.alias_history("default", "bot", "prod")) == 1


def test_a_reader_of_the_changes_misses_none(catalog, at_once):
    """A sequence that is given out before the commit would let a reader pass one that is committed later."""
    num_each = 10
    total = 8 * num_each

    def write(number: int, own: SqlCatalog) -> None:
        for step in range(num_each):
            revision_id = content(f"{number}/{step}")
            own.add_revision("default", f"a{number}", manifest(), revision_id, 1, stored_since=0)

    def follow(number: int, own: SqlCatalog) -> list[int]:
        seen: list[int] = []
        while len(seen) < total:
            last = seen[-1] if seen else 0
            assert own.wait_for_change(last, 10) > last
            seen += [change.sequence for change in own.changes_since(last)]
        return seen

    found = at_once(follow, follow, *[write] * 8)
    assert found[:2] == [list(range(1, total + 1))] * 2
