"""What a tenant may have in the catalog, on both databases."""

from __future__ import annotations

import pytest
from support.catalog_databases import content, manifest

from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.tenants import TenantRoom
from adapters.errors import TenantFull


def add(catalog: SqlCatalog, name: str, number: int, room: TenantRoom, tenant: str = "acme") -> int:
    since = catalog.last_change()
    added = catalog.add_revision(tenant, name, manifest(), content(number), 1000, stored_since=since, room=room)
    return added.number


def test_adapters(catalog: SqlCatalog):
    room = TenantRoom(adapters=2)
    add(catalog, "a", 1, room)
    add(catalog, "b", 1, room)
    before = catalog.last_change()
    with pytest.raises(TenantFull, match="tenant acme may have 2 adapters, and would have 3; delete"):
        add(catalog, "c", 1, room)
    assert [each.name for each in catalog.list("acme")] == ["a", "b"]
    assert catalog.last_change() == before
    assert add(catalog, "a", 2, room) == 2
    add(catalog, "c", 1, room, tenant="beta")
    catalog.delete("acme", "a")  # it can be restored
    with pytest.raises(TenantFull):
        add(catalog, "c", 1, room)


def test_revisions(catalog: SqlCatalog):
    room = TenantRoom(revisions=2)
    add(catalog, "a", 1, room)
    add(catalog, "b", 2, room)
    with pytest.raises(TenantFull, match="2 revisions"):
        add(catalog, "a", 3, room)
    assert add(catalog, "a", 1, room) == 1  # it has it


def test_bytes_of_equal_content_count_once(catalog: SqlCatalog):
    room = TenantRoom(bytes=2500)
    for name in ("a", "b", "c"):
        add(catalog, name, 1, room)
    add(catalog, "a", 2, room)
    with pytest.raises(TenantFull, match="2500 bytes of revisions, and would have 3000"):
        add(catalog, "a", 3, room)
