"""Processes' locks on the catalog's database: none of them holds up what it is not about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from support.adapters.catalog_databases import add

from adapters.catalog.records import AuditEvent
from adapters.catalog.sql import SqlCatalog

A_MINUTE = 60.0


def move_alias(catalog: SqlCatalog) -> None:
    catalog.set_alias("default", "bot", "prod", 1)


def audit(catalog: SqlCatalog) -> None:
    event = AuditEvent(datetime.now(UTC), "somebody", None, "adapter.alias", "bot", None, None, "done", None)
    catalog.audit.append([event])


def collect(catalog: SqlCatalog) -> None:
    with catalog.collecting():
        catalog.collect_garbage(datetime(1970, 1, 1, tzinfo=UTC))


WORK: dict[str, Callable[[SqlCatalog], None]] = {"alias": move_alias, "audit": audit, "gc": collect}


@pytest.mark.parametrize("work", [name for name in WORK if name != "gc"])
def test_what_goes_on_during_a_garbage_collection(catalog, database, work):
    add(catalog, "bot", 1)
    with catalog.collecting() as check_still_held:
        WORK[work](catalog)
        other = SqlCatalog(database.url)
        WORK[work](other)
        other.close()
        check_still_held()


def test_the_audit_log_waits_for_no_writer(catalog, database):
    """Another process may be in a long change."""
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
            audit(catalog)
            assert not ended.is_set()
        moving.result(A_MINUTE)
