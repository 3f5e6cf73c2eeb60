"""Keys and grants in the catalog, on both databases."""

from datetime import timedelta

import pytest
from support.adapters.catalog_databases import CatalogDatabase, add, content, manifest

from adapters.catalog.api_keys import digest_of, key_id_of
from adapters.catalog.records import Grant
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.tenants import RemovedTenant, digest_of_tenant
from adapters.errors import AccessNotFound, AdapterNotFound, CatalogConflict, InvalidReference
from adapters.scopes import Permission, Scope

INFER, READ = Permission.INFER, Permission.READ


def test_a_key_is_kept_as_a_digest_only(database: CatalogDatabase, catalog: SqlCatalog):
    expires_at = catalog.now() + timedelta(hours=1)
    record, key = catalog.keys.create("acme", "ci", {Scope.INFER, Scope.ADMIN}, expires_at=expires_at, by="me")
    assert key_id_of(key) == record.key_id
    assert record.digest == digest_of(key)
    (row,) = database.query("SELECT * FROM api_keys")
    assert key.split("_", 2)[2] not in str(row)  # its secret, which may contain underscores
    assert catalog.keys.list("acme") == [record] == catalog.keys.list()
    assert catalog.keys.list("beta") == []
    assert record.is_usable(catalog.now())
    assert not record.is_usable(expires_at)


def test_a_change_is_read_by_itself(catalog: SqlCatalog):
    first, _ = catalog.keys.create("acme", "one", {Scope.INFER}, expires_at=None, by=None)
    known = catalog.last_change()
    second, _ = catalog.keys.create("acme", "two", {Scope.INFER}, expires_at=None, by=None)
    assert catalog.keys.changed_since(known) == [second]
    revoked = catalog.keys.revoke(first.key_id)
    assert not revoked.is_usable(catalog.now())
    assert {each.key_id for each in catalog.keys.changed_since(known)} == {first.key_id, second.key_id}
    assert [each.kind for each in catalog.changes_since(0)] == ["keys"] * 3
    with pytest.raises(CatalogConflict, match="was revoked"):
        catalog.keys.revoke(first.key_id)
    with pytest.raises(AccessNotFound, match="no key"):
        catalog.keys.revoke("nosuchkey")


@pytest.mark.parametrize("tenant", ["", "*", "a/b", "../x", "аcme", "acme\n", "a" * 64])  # the fifth is Cyrillic
def test_names_of_tenants_that_are_refused(catalog: SqlCatalog, tenant: str):
    with pytest.raises(InvalidReference, match="not a tenant"):
        catalog.keys.create(tenant, "ci", {Scope.INFER}, expires_at=None, by=None)
    assert catalog.last_change() == 0


def test_keys_that_are_refused(catalog: SqlCatalog):
    with pytest.raises(ValueError, match="without any scope"):
        catalog.keys.create("acme", "ci", (), expires_at=None, by=None)
    with pytest.raises(ValueError, match="expired already"):
        catalog.keys.create("acme", "ci", {Scope.INFER}, expires_at=catalog.now() - timedelta(seconds=1), by=None)
    with pytest.raises(ValueError, match="printable"):
        catalog.keys.create("acme", "a\nb", {Scope.INFER}, expires_at=None, by=None)


def test_grants(catalog: SqlCatalog):
    add(catalog, "legal", 1, tenant="acme")
    add(catalog, "tax", 2, tenant="acme")
    add(catalog, "own", 3, tenant="beta")
    one, every = Grant("acme", "legal", "beta", INFER), Grant("acme", None, "gamma", READ)
    assert catalog.grants.add(one, by="me")
    assert not catalog.grants.add(one, by="me")
    assert catalog.grants.add(every, by="me")
    assert catalog.grants.list("acme") == [every, one] == catalog.grants.list()
    assert catalog.grants.list("gamma") == [every]

    def seen(tenant: str, permission: Permission) -> list[str]:
        return [each.full_name for each in catalog.list(viewer=(tenant, permission))]

    assert seen("beta", INFER) == ["acme/legal", "beta/own"]
    assert seen("beta", READ) == ["beta/own"]
    assert seen("gamma", READ) == ["acme/legal", "acme/tax"]
    assert catalog.list("acme", viewer=("delta", INFER)) == []
    catalog.grants.remove(one)
    assert seen("beta", INFER) == ["beta/own"]
    with pytest.raises(AccessNotFound, match="no grant"):
        catalog.grants.remove(one)
    with pytest.raises(AdapterNotFound):
        catalog.grants.add(Grant("acme", "typo", "beta", INFER), by=None)
    with pytest.raises(InvalidReference, match="own adapters anyway"):
        catalog.grants.add(Grant("acme", None, "acme", INFER), by=None)


def test_a_new_adapter_is_no_earlier_one_of_its_name(catalog: SqlCatalog):
    """It is younger, and shares no prefixes because that one did."""
    add(catalog, "legal", 1, tenant="acme")
    created_at = catalog.list("acme")[0].created_at
    assert not catalog.resolve("acme/legal").shares_prefixes
    catalog.grants.set_shared_prefixes("acme", "legal", True)
    assert catalog.resolve("acme/legal").shares_prefixes
    assert (catalog.changes_since(0)[-1].kind, catalog.changes_since(0)[-1].name) == ("sharing", "legal")
    catalog.delete("acme", "legal")
    catalog.restore("acme", "legal")
    assert catalog.resolve("acme/legal").shares_prefixes  # it is the same adapter
    catalog.delete("acme", "legal")
    catalog.collect_garbage(catalog.now())
    catalog.confirm_removed([content(1)])
    assert not add(catalog, "legal", 2, tenant="acme").shares_prefixes
    assert not catalog.resolve("acme/legal").shares_prefixes
    assert catalog.list("acme")[0].created_at > created_at


def test_a_new_adapter_has_no_grants_of_an_earlier_one_of_its_name(database: CatalogDatabase, catalog: SqlCatalog):
    add(catalog, "legal", 1, tenant="acme")
    add(catalog, "tax", 2, tenant="acme")
    add(catalog, "legal", 3, tenant="beta")
    every, other, namesake = (
        Grant("acme", None, "delta", READ),
        Grant("acme", "tax", "gamma", INFER),
        Grant("beta", "legal", "gamma", INFER),
    )
    own = [Grant("acme", "legal", "gamma", INFER), Grant("acme", "legal", "gamma", READ)]
    for grant in (every, other, namesake, *own):
        catalog.grants.add(grant, by=None)
    catalog.delete("acme", "legal")
    catalog.restore("acme", "legal")
    assert set(catalog.grants.list()) == {every, other, namesake, *own}  # it is the same adapter
    catalog.delete("acme", "legal")
    before = catalog.last_change()
    catalog.collect_garbage(catalog.now())
    assert catalog.grants.list() == [every, other, namesake]
    assert "grants" in {each.kind for each in catalog.changes_since(before)}  # by which routers read them again
    catalog.confirm_removed([content(1)])

    # A purge by a version that left them.
    database.query(
        "INSERT INTO grants (owner, name, grantee, permission, created_at) "
        "VALUES ('acme', 'legal', 'gamma', 'infer', '2026-01-01 00:00:00') RETURNING owner"
    )
    before = catalog.last_change()
    add(catalog, "legal", 4, tenant="acme")
    assert catalog.grants.list() == [every, other, namesake]
    assert [each.kind for each in catalog.changes_since(before)] == ["grants", "import"]
    assert [each.full_name for each in catalog.list(viewer=("gamma", INFER))] == ["acme/tax", "beta/legal"]


def test_a_tenant_is_removed_whole(database: CatalogDatabase, catalog: SqlCatalog):
    add(catalog, "legal", 1, tenant="acme")
    add(catalog, "legal", 2, tenant="acme")
    add(catalog, "own", 2, tenant="beta")
    catalog.keys.create("acme", "ci", {Scope.INFER}, expires_at=None, by=None)
    catalog.grants.add(Grant("acme", None, "beta", INFER), by=None)
    before = catalog.last_change()
    assert catalog.tenants.remains("acme")["adapters"] == 1
    removed = catalog.tenants.remove("acme")
    generation = removed.generation
    assert (removed.num_adapters, removed.num_alias_moves, removed.num_keys, removed.num_grants) == (1, 2, 1, 1)
    assert removed.revision_ids == (content(1),)  # beta has the other one
    assert set(catalog.tenants.remains("acme").values()) == {0}
    assert catalog.tenants.still_in_catalog([content(1), content(2)]) == [content(2)]
    assert catalog.collect_garbage(catalog.now()) == [content(1)]
    assert [each.name for each in catalog.tenants.list()] == ["beta"]
    assert [(each.kind, each.tenant) for each in catalog.changes_since(before)] == [("tenants", None)]
    assert len(catalog.changes_since(0)) == before + 1  # without gaps
    assert catalog.tenants.remove("acme") == RemovedTenant(0, 0, 0, 0, (), generation, again=True)
    assert catalog.tenants.removed([content(1), content(2), content(3)]) == {content(1)}
    catalog.confirm_removed([content(1)])
    add(catalog, "legal", 1, tenant="gamma")
    assert catalog.tenants.removed([content(1)]) == set()
    with pytest.raises(AccessNotFound):
        catalog.tenants.remove("acne")


def test_a_tenant_of_tokens_is_removed_without_a_row(database: CatalogDatabase, catalog: SqlCatalog):
    """Its next one begins another prefix cache, each time. No name stays: generations are known by its digest."""
    assert catalog.tenants.generations() == {}
    seen: list[int] = []
    for number in range(3):
        before = catalog.last_change()
        removed = catalog.tenants.remove("acme", has_tokens=True)
        seen.append(removed.generation)
        assert removed == RemovedTenant(0, 0, 0, 0, (), seen[-1], again=number > 0)
        assert [each.kind for each in catalog.changes_since(before)] == ["tenants"]  # by which routers read them again
        assert catalog.tenants.generations() == {digest_of_tenant("acme"): seen[-1]}
    assert len({0, *seen}) == 4
    assert catalog.tenants.remove("acme").generation == seen[-1]
    beta = catalog.tenants.remove("beta", has_tokens=True).generation
    assert catalog.tenants.generations() == {digest_of_tenant("acme"): seen[-1], digest_of_tenant("beta"): beta}
    assert not any("acme" in str(row) for row in database.query("SELECT * FROM tenant_generations"))
    with pytest.raises(AccessNotFound):
        catalog.tenants.remove("no/name", has_tokens=True)


def test_memory_only_revisions_of_a_tenant_are_noted_as_removed(catalog: SqlCatalog):
    for _ in range(2):  # the second time there is a note already
        catalog.add_revision("acme", "legal", manifest(), content(1), 1000, stored_since=None)
        assert catalog.tenants.remove("acme").revision_ids == (content(1),)
        assert catalog.tenants.removed([content(1)]) == {content(1)}
    assert catalog.collect_garbage(catalog.now()) == [content(1)]
    catalog.confirm_removed([content(1)])
    add(catalog, "legal", 1, tenant="acme")
    assert catalog.tenants.removed([content(1)]) == set()
