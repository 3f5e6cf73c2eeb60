"""Processes' locks on the catalog's database: none of them holds up what it is not about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime

import psycopg
import pytest
from support.adapters.catalog_databases import CatalogDatabase, add

from adapters.catalog.quota_leases import RateAsk
from adapters.catalog.records import AuditEvent
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.locks import AdvisoryLock

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


def wait_for_waiter(database: CatalogDatabase, waiting: threading.Event) -> None:
    """Until a transaction waits for an advisory lock."""
    while not database.query("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"):
        assert not waiting.is_set(), "it did not wait for the lock"
        time.sleep(0.01)


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
    if database.kind == "sqlite":
        pytest.skip("one transaction writes at a time")
    add(catalog, "bot", 1)
    ended = threading.Event()

    def wait_for_lease() -> None:
        try:
            lease(catalog)
        finally:
            ended.set()

    with ThreadPoolExecutor(1) as threads:
        with held(database, AdvisoryLock.LEASE):
            leasing = threads.submit(wait_for_lease)
            wait_for_waiter(database, ended)
            WORK[work](catalog)
            assert not ended.is_set()
        leasing.result(A_MINUTE)


def test_a_lease_waits_for_no_writer(catalog, database):
    """Nor does the audit log: another process may be in a long change."""
    if database.kind == "sqlite":
        pytest.skip("one transaction writes at a time")
    add(catalog, "bot", 1)
    ended = threading.Event()

    def wait_for_turn() -> None:
        try:
            move_alias(catalog)
        finally:
            ended.set()

    with ThreadPoolExecutor(1) as threads:
        with database.locked():
            moving = threads.submit(wait_for_turn)
            while not database.query("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
                assert not ended.is_set(), "it did not wait for its turn"
                time.sleep(0.01)
            lease(catalog)
            audit(catalog)
            assert not ended.is_set()
        moving.result(A_MINUTE)
