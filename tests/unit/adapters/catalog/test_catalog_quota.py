"""What a tenant may have in the catalog, on both databases."""

from __future__ import annotations

import pytest
from support.adapters.catalog_databases import TOMORROW, content, manifest

from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.tenants import CatalogQuota
from adapters.errors import TenantFull


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
