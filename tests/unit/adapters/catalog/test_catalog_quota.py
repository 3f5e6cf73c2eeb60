"""What a tenant may have in the catalog, and how routers share its limits, on both databases."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.adapters.catalog_databases import TOMORROW, CatalogDatabase, content, manifest

from adapters.catalog.quota_leases import GaugeAsk, RateAsk
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.tenants import CatalogQuota
from adapters.errors import TenantFull

SLOW = 1e-6  # tokens a second, so that time does not matter


def add(catalog: SqlCatalog, name: str, number: int, quota: CatalogQuota, tenant: str = "acme") -> int:
    since = catalog.last_change()
    added = catalog.add_revision(tenant, name, manifest(), content(number), 1000, stored_since=since, quota=quota)
    return added.number


def test_adapters(catalog: SqlCatalog):
    quota = CatalogQuota(adapters=2)
    add(catalog, "a", 1, quota)
    add(catalog, "b", 1, quota)
    before = catalog.last_change()
    with pytest.raises(TenantFull, match="tenant acme may have 2 adapters, and would have 3; delete"):
        add(catalog, "c", 1, quota)
    assert [each.name for each in catalog.list("acme")] == ["a", "b"]
    assert catalog.last_change() == before
    assert add(catalog, "a", 2, quota) == 2
    add(catalog, "c", 1, quota, tenant="beta")
    catalog.delete("acme", "a")  # it can be restored
    with pytest.raises(TenantFull):
        add(catalog, "c", 1, quota)
    catalog.confirm_removed(catalog.collect_garbage(TOMORROW))
    assert add(catalog, "c", 1, quota) == 1


def test_revisions(catalog: SqlCatalog):
    quota = CatalogQuota(revisions=2)
    add(catalog, "a", 1, quota)
    add(catalog, "b", 2, quota)
    with pytest.raises(TenantFull, match="2 revisions"):
        add(catalog, "a", 3, quota)
    assert add(catalog, "a", 1, quota) == 1  # it has it


def test_bytes_of_equal_content_count_once(catalog: SqlCatalog):
    quota = CatalogQuota(bytes=2500)
    for name in ("a", "b", "c"):
        add(catalog, name, 1, quota)
    add(catalog, "a", 2, quota)
    with pytest.raises(TenantFull, match="2500 bytes of revisions, and would have 3000"):
        add(catalog, "a", 3, quota)


def test_pins_of_revisions_in_memory_only(catalog: SqlCatalog):
    """By whatever way an alias comes to point at one. Who has too many may still have fewer."""
    quota = CatalogQuota(pins=1)

    def push(name: str, number: int, allowed: CatalogQuota | None = quota, alias: str | None = None) -> int:
        added = catalog.add_revision(
            "acme", name, manifest(), content(number), 1000, stored_since=None, alias=alias, quota=allowed
        )
        return added.number

    assert push("a", 1) == 1
    assert push("a", 2) == 2  # `latest` leaves the first one
    before = catalog.last_change()
    with pytest.raises(TenantFull, match="1 pins of revisions that are in memory only, and would have 2; point"):
        push("b", 3)
    with pytest.raises(TenantFull):
        catalog.set_alias("acme", "a", "kept", 1, quota=quota)
    assert catalog.last_change() == before
    assert [each.name for each in catalog.list("acme")] == ["a"]
    add(catalog, "a", 4, quota)  # a stored one
    assert push("b", 3) == 1
    with pytest.raises(TenantFull):
        catalog.rollback("acme", "a", quota=quota)
    catalog.delete("acme", "b")
    catalog.rollback("acme", "a", quota=quota)
    assert push("same", 2) == 1  # of equal content, which workers keep once
    push("c", 5, allowed=None)
    push("d", 6, allowed=None)
    catalog.set_alias("acme", "d", "latest", 1, quota=quota)
    add(catalog, "c", 7, quota)
    with pytest.raises(TenantFull):
        catalog.rollback("acme", "c", quota=quota)
    push("e", 8, allowed=None)
    catalog.delete("acme", "e")
    with pytest.raises(TenantFull):
        catalog.restore("acme", "e", quota=quota)


def rate(left: float, wanted: float, advance: float = 0.0, subject: str = "tenant:acme/requests") -> RateAsk:
    return RateAsk(subject, SLOW, 100.0, left, wanted, advance)


def test_what_one_router_has_the_others_do_not(catalog: SqlCatalog):
    pool = catalog.quotas
    leases = pool.lease("one", [rate(0, 60)], [])
    assert leases.num_members == 1
    assert leases.rates == [pytest.approx((60, 40))]
    leases = pool.lease("two", [rate(0, 60)], [])
    assert leases.num_members == 2
    assert leases.rates == [pytest.approx((20, 20))]
    assert pool.lease("one", [rate(50, 0)], []).rates == [pytest.approx((-50, 70))]
    assert pool.lease("two", [rate(20, 20, advance=30)], []).rates == [pytest.approx((0, 40))]


def test_a_bucket_fills_by_the_database_clock(catalog: SqlCatalog, database: CatalogDatabase):
    catalog.quotas.lease("one", [rate(0, 100)], [])
    database.query("UPDATE quota_pools SET at = at - 10000000 RETURNING 1")
    assert catalog.quotas.lease("one", [rate(0, 0)], []).rates == [pytest.approx((0, 10), abs=0.1)]


def test_what_is_in_use_at_a_time(catalog: SqlCatalog, database: CatalogDatabase):
    pool = catalog.quotas

    def ask(member: str, used: float, wanted: float) -> float:
        (allowed,) = pool.lease(member, [], [GaugeAsk("s", 10, used, wanted)]).gauges
        return allowed

    assert ask("one", 8, 8) == 10
    assert ask("two", 0, 5) == 0
    assert ask("one", 8, 8) == 5  # its fair part; it holds 8 as long as they run
    assert ask("two", 0, 5) == 2
    assert ask("one", 4, 4) == 5  # what nobody wants is given out, too
    assert ask("two", 2, 5) == 5
    pool.leave("one")
    assert ask("two", 2, 9) == 10
    assert "tenant" not in str(database.query("SELECT * FROM quota_holdings"))


@pytest.mark.parametrize("seen_s_ago", [11, -3600])
def test_a_router_that_is_gone_holds_nothing(catalog: SqlCatalog, database: CatalogDatabase, seen_s_ago: int):
    catalog.quotas.lease("one", [], [GaugeAsk("s", 10, 10, 10)])
    database.query(f"UPDATE quota_members SET seen_at = seen_at - {seen_s_ago} RETURNING 1")
    leases = catalog.quotas.lease("two", [], [GaugeAsk("s", 10, 0, 10)])
    assert (leases.num_members, leases.gauges) == (1, [10])


def test_full_buckets_are_no_rows_and_no_row_names_a_tenant(catalog: SqlCatalog, database: CatalogDatabase):
    catalog.quotas.lease("one", [rate(0, 1), rate(0, 1, subject="tenant:beta/requests")], [])
    rows = database.query("SELECT * FROM quota_pools")
    assert len(rows) == 2
    assert "acme" not in str(rows)
    database.query("UPDATE quota_pools SET full_at = 0 RETURNING 1")
    catalog.quotas.lease("one", [rate(0, 1)], [])
    assert len(database.query("SELECT * FROM quota_pools")) == 1


def test_routers_that_ask_at_once_take_turns(catalog: SqlCatalog):
    def take(member: str) -> float:
        ((granted, _),) = catalog.quotas.lease(member, [rate(0, 1000, subject="s")], []).rates
        return granted

    with ThreadPoolExecutor(8) as threads:
        granted = list(threads.map(take, [f"r{number % 4}" for number in range(24)]))
    assert sum(granted) <= 100.001
    assert sum(granted) > 90


def test_leases_are_no_changes_of_the_catalog(catalog: SqlCatalog):
    before = catalog.last_change()
    catalog.quotas.lease("one", [rate(0, 1)], [])
    assert catalog.last_change() == before
