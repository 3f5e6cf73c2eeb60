"""Many at once on one catalog, and their locks: none holds up what it is not about."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import UTC, datetime

import psycopg
import pytest
from support.adapters.catalog_databases import CatalogDatabase, add, content, manifest

from adapters.catalog.quota_leases import RateAsk
from adapters.catalog.records import AuditEvent
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.locks import AdvisoryLock
from adapters.errors import CatalogConflict

A_MINUTE = 60.0


def move_alias(catalog: SqlCatalog) -> None:
    catalog.set_alias("default", "bot", "prod", 1)


def audit(catalog: SqlCatalog) -> None:
    event = AuditEvent(datetime.now(UTC), "somebody", None, "adapter.alias", "bot", None, None, "done", None)
    catalog.audit.append([event])


def lease(catalog: SqlCatalog) -> None:
    assert catalog.quotas.lease("one", [RateAsk("s", 1.0, 100.0, 0.0, 1.0, 0.0)], []).num_members == 1


def collect(catalog: SqlCatalog) -> None:
    with catalog.collecting():
        catalog.collect_garbage(datetime(1970, 1, 1, tzinfo=UTC))


WORK: dict[str, Callable[[SqlCatalog], None]] = {"alias": move_alias, "audit": audit, "lease": lease, "gc": collect}


@contextmanager
def held(database: CatalogDatabase, lock: AdvisoryLock) -> Iterator[None]:
    """Another process has this lock."""
    with psycopg.connect(database.url) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [int(lock)])
        yield


@contextmanager
def blocked(
    database: CatalogDatabase, catalog: SqlCatalog, work: str, lock: AbstractContextManager[None]
) -> Iterator[None]:
    """This work waits in another thread, for as long as the context lasts and the lock is held."""
    if database.kind == "sqlite":
        pytest.skip("one transaction writes at a time")
    add(catalog, "bot", 1)
    with ThreadPoolExecutor(1) as threads:
        with lock:
            working = threads.submit(WORK[work], catalog)
            while not database.query("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
                assert not working.done(), "it did not wait"
                time.sleep(0.01)
            yield
            assert not working.done()
        working.result(A_MINUTE)


@pytest.mark.parametrize("work", [name for name in WORK if name != "gc"])
def test_what_goes_on_during_a_garbage_collection(catalog, database, work):
    add(catalog, "bot", 1)
    with catalog.collecting() as check_still_held:
        WORK[work](catalog)
        other = SqlCatalog(database.url)
        WORK[work](other)
        other.close()
        check_still_held()


@pytest.mark.parametrize("work", [name for name in WORK if name != "lease"])
def test_what_goes_on_while_a_lease_waits(catalog, database, work):
    """A router that stands still in its lease holds up those of others, and nothing else of theirs."""
    with blocked(database, catalog, "lease", held(database, AdvisoryLock.LEASE)):
        WORK[work](catalog)


def test_a_lease_waits_for_no_writer(catalog, database):
    """Nor does the audit log: another process may be in a long change."""
    with blocked(database, catalog, "alias", database.locked()):
        lease(catalog)
        audit(catalog)


NUM_THREADS = 16


@pytest.fixture
def at_once(catalog: SqlCatalog, database: CatalogDatabase):
    """Runs work(number, catalog) in as many threads as there are kinds of work, begun together; their results."""

    def run(*works: Callable[[int, SqlCatalog], object]) -> list[object]:
        barrier = threading.Barrier(len(works))

        def one(number: int) -> object:
            with closing(SqlCatalog(database.url)) as own:
                barrier.wait()
                return works[number](number, own)

        with ThreadPoolExecutor(len(works)) as pool:
            return list(pool.map(one, range(len(works))))

    return run


@pytest.mark.slow
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


@pytest.mark.slow
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
            seen += [change.sequence for change in own.changes_since(seen[-1] if seen else 0)]
            time.sleep(0.01)
        return seen

    found = at_once(follow, follow, *[write] * 8)
    assert found[:2] == [list(range(1, total + 1))] * 2
