"""A change is refused in its own transaction if the right to it has ended since it began."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from support.adapters.catalog_databases import CatalogDatabase, add, content

from adapters.catalog.records import Grant
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.rights import Right
from adapters.errors import RightWithdrawn
from adapters.scopes import Permission, Scope

CHANGES: dict[str, Callable[[SqlCatalog], object]] = {
    "import": lambda catalog: add(catalog, "bot", 3, tenant="acme"),
    "import of a new adapter": lambda catalog: add(catalog, "new", 3, tenant="acme"),
    "memory-only": lambda catalog: catalog.add_revision(
        "acme", "bot", catalog.resolve("acme/bot").manifest, content(4), 1, stored_since=None, alias="train"
    ),
    "alias": lambda catalog: catalog.set_alias("acme", "bot", "prod", 2),
    "rollback": lambda catalog: catalog.rollback("acme", "bot"),
    "delete": lambda catalog: catalog.delete("acme", "bot"),
    "restore": lambda catalog: catalog.restore("acme", "old"),
    "key": lambda catalog: catalog.keys.create("acme", "k", {Scope.INFER}, expires_at=None, by=None),
    "revocation": lambda catalog: catalog.keys.revoke(catalog.keys.list("acme")[0].key_id),
    "grant": lambda catalog: catalog.grants.add(Grant("acme", "bot", "beta", Permission.READ), by=None),
    "prefixes": lambda catalog: catalog.grants.set_shared_prefixes("acme", "bot", True),
    "tenant": lambda catalog: catalog.tenants.remove("acme"),
    "purge": lambda catalog: catalog.collect_garbage(datetime.now(UTC) + timedelta(days=1)),
}


def populate(catalog: SqlCatalog) -> str:
    """What every change needs; returns the id of a key of acme."""
    for number in (1, 2):
        add(catalog, "bot", number, tenant="acme")
    add(catalog, "old", 1, tenant="acme")
    catalog.delete("acme", "old")
    record, _ = catalog.keys.create("acme", "test", {Scope.ADAPTERS_WRITE}, expires_at=None, by=None)
    return record.key_id


def remove_tenant(catalog: SqlCatalog) -> None:
    catalog.confirm_removed(catalog.tenants.remove("acme").revision_ids)


def right_to(catalog: SqlCatalog, key_id: str | None = None) -> Right:
    return Right(("acme",), catalog.tenants.generations(), key_id, Scope.ADAPTERS_WRITE)


def refused(catalog: SqlCatalog, right: Right, change: Callable[[SqlCatalog], object], reason: str) -> None:
    before = catalog.last_change()
    with pytest.raises(RightWithdrawn, match=reason):
        change(catalog.permitted(right))
    assert catalog.last_change() == before


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_kind_of_change(catalog: SqlCatalog, change: Callable[[SqlCatalog], object]):
    key_id = populate(catalog)
    right = right_to(catalog, key_id)
    catalog.keys.revoke(key_id)
    refused(catalog, right, change, f"the key {key_id} was revoked or has expired")
    remove_tenant(catalog)
    populate(catalog)  # the next tenant of the name has all that the change needs
    refused(catalog, replace(right, key_id=None), change, "the tenant 'acme' was deleted after this change began")
    change(catalog.permitted(right_to(catalog)))


def test_what_ends_a_key(catalog: SqlCatalog, database: CatalogDatabase):
    key_id = populate(catalog)
    right = right_to(catalog, key_id)
    catalog.permitted(right).set_alias("acme", "bot", "prod", 1)
    database.query(f"UPDATE api_keys SET expires_at = '2020-01-01 00:00:00' WHERE key_id = '{key_id}'")
    refused(catalog, right, CHANGES["alias"], "revoked or has expired")
    database.query(f"UPDATE api_keys SET expires_at = NULL, scopes = 'infer' WHERE key_id = '{key_id}'")
    refused(catalog, right, CHANGES["alias"], f"the key {key_id} has lost the scope adapters:write")
    database.query(f"UPDATE api_keys SET scopes = 'admin' WHERE key_id = '{key_id}'")
    catalog.permitted(right).set_alias("acme", "bot", "prod", 2)
    refused(catalog, replace(right, key_id="unknown"), CHANGES["alias"], "the key unknown was revoked")


def test_what_ends_a_token(catalog: SqlCatalog):
    populate(catalog)
    right = right_to(catalog)
    refused(catalog, replace(right, expires_at=catalog.now()), CHANGES["alias"], "the token has expired")
    catalog.permitted(replace(right, expires_at=catalog.now() + timedelta(hours=1))).delete("acme", "bot")


def test_a_tenant_on_either_side_ends_it(catalog: SqlCatalog):
    """Whose adapter it is, and who changes it."""
    populate(catalog)
    add(catalog, "bot", 1, tenant="ops")
    right = replace(right_to(catalog), tenants=("ops", "acme"))
    catalog.tenants.remove("ops")
    refused(catalog, right, CHANGES["alias"], "the tenant 'ops' was deleted")
