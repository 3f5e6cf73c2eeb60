"""A router with keys: two tenants, an adapter of one of them, and calls with a key."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.adapters.catalog_databases import add
from support.router_stand_ins import ClusterStandIn, eventually, running_cluster
from support.routers.management_calls import ask

from adapters.catalog.sql import SqlCatalog
from adapters.scopes import Scope

TENANT_SCOPES = frozenset(Scope) - {Scope.ADMIN}


@dataclass
class KeyedCluster:
    """A running router that asks for keys. `acme/bot` exists; `beta` has no adapter."""

    cluster: ClusterStandIn
    catalog: SqlCatalog

    async def key(self, tenant: str, scopes: Collection[Scope] = TENANT_SCOPES) -> str:
        """A new key, which the router knows."""
        _, key = self.catalog.keys.create(tenant, "test", scopes, expires_at=None, by="test")
        await self.cluster.adapters.refresh()
        return key

    async def ask(self, key: str | None, method: str, path: str, **options: Any) -> tuple[int, Any]:
        headers = options.pop("headers", {})
        if key is not None:
            headers = {**headers, "authorization": f"Bearer {key}"}
        return await ask(self.cluster, method, path, headers=headers, **options)

    async def complete(self, key: str, **fields: Any) -> tuple[int, Any]:
        """A completion."""
        return await self.ask(key, "POST", "/v1/completions", json={"model": "base", "prompt": "Hi", **fields})


@asynccontextmanager
async def keyed_cluster(
    folder: Path, *counts: int, url: str | None = None, **config: Any
) -> AsyncIterator[KeyedCluster]:
    """`counts` of prefill, decode and unified workers. `url`: of an empty database, in place of a new SQLite file."""
    url = url or f"sqlite:///{folder / 'catalog.db'}"
    with closing(SqlCatalog.open(url)) as catalog:
        add(catalog, "bot", 1, tenant="acme")
        async with running_cluster(
            *counts, folder=folder, catalog_url=url, directories={}, **{"auth": {}, "management": True, **config}
        ) as cluster:
            await eventually(lambda: _loaded(cluster), bool, within_s=120)
            yield KeyedCluster(cluster, catalog)


async def _loaded(cluster: ClusterStandIn) -> bool:
    return cluster.adapters.directory.is_loaded
