"""The right to a change ends after its request and its upload, just before its first commit: nothing is changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.adapters.catalog_databases import CatalogDatabase, add
from support.routers.keyed_cluster import TENANT_SCOPES, KeyedCluster, keyed_cluster
from support.routers.management_calls import form, lora

from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.database import Database

ONE = "/v1/adapters/acme/bot"
# Each change: method, path, and what is sent.
CHANGES: dict[str, tuple[str, str, Callable[[dict[str, bytes]], dict[str, Any]]]] = {
    "import": ("POST", "/v1/adapters", lambda files: {"data": form(files, name="acme/new")}),
    "import and alias": ("POST", "/v1/adapters", lambda files: {"data": form(files, name="acme/bot", alias="prod")}),
    "push": ("POST", f"{ONE}/push", lambda files: {"data": form(files)}),
    "push in memory": ("POST", f"{ONE}/push", lambda files: {"data": form(files, memory_only="true")}),
    "alias": ("PUT", f"{ONE}/aliases/prod", lambda _: {"json": {"revision": "r1"}}),
    "rollback": ("POST", f"{ONE}/rollback", lambda _: {}),
    "delete": ("DELETE", ONE, lambda _: {}),
    "restore": ("POST", "/v1/adapters/acme/old/restore", lambda _: {}),
}  # fmt: skip


def populate(catalog: SqlCatalog) -> None:
    for number in (1, 2):
        add(catalog, "bot", number, tenant="acme")
    add(catalog, "old", 1, tenant="acme")
    catalog.delete("acme", "old")


def delete_tenant(keyed: KeyedCluster) -> None:
    """The next tenant of the name has all that the change needs."""
    keyed.catalog.confirm_removed(keyed.catalog.tenants.remove("acme").revision_ids)
    populate(keyed.catalog)


def revoke_key(keyed: KeyedCluster) -> None:
    keyed.catalog.keys.revoke(keyed.catalog.keys.list("acme")[0].key_id)


@pytest.mark.parametrize("withdraw", [delete_tenant, revoke_key])
async def test_every_change(
    database: CatalogDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, withdraw: Callable[[KeyedCluster], None]
):
    made: list[str] = []
    files = lora(tmp_path, 9)
    write: Any = Database.write
    before_next_write: list[Callable[[], None]] = []

    def interrupted_write(self: Database, work: Any) -> Any:
        if before_next_write:
            before_next_write.pop()()
        return write(self, work)

    monkeypatch.setattr(Database, "write", interrupted_write)

    async with keyed_cluster(tmp_path, 1, 1, url=database.url) as keyed:
        for name, (method, path, options) in CHANGES.items():
            delete_tenant(keyed)
            key = await keyed.key("acme", TENANT_SCOPES)
            state: list[Any] = []

            def interrupt(state: list[Any] = state) -> None:
                withdraw(keyed)
                state.append((keyed.catalog.last_change(), keyed.catalog.list("acme")))

            before_next_write.append(interrupt)
            status, answer = await keyed.ask(key, method, path, **options(files))
            assert state, f"{name} has committed nothing"
            is_refused = status == 403 and answer["error"]["code"] == "right_withdrawn"
            if not is_refused or state != [(keyed.catalog.last_change(), keyed.catalog.list("acme"))]:
                made.append(f"{name}: {status} {answer}")
            # Whoever may still make the change is not refused: the router has seen the deletion.
            again = await keyed.key("acme", TENANT_SCOPES)
            status, answer = await keyed.ask(again, method, path, **options(files))
            assert status in (200, 201), (name, answer)
    assert made == []
