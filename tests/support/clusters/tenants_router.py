"""A second router of a running cluster, for tenants: keys, quotas, turns, TLS and management of adapters."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import httpx
from support.clusters.certificates import authority, issued
from support.clusters.running_cluster import RunningCluster

from adapters.catalog.records import Grant
from adapters.catalog.sql import SqlCatalog
from adapters.scopes import Permission, Scope
from cluster.config.load import dump_cluster_config
from cluster.config.router import RouterConfig
from cluster.config.schema import ClusterConfig
from process.certificates.contexts import make_pinned_context
from process.free_ports import free_port

START_TIMEOUT_S = 60.0
SCOPES = frozenset(Scope) - {Scope.ADMIN}


@dataclass(frozen=True)
class TenantsRouter:
    """What tests know of it."""

    config: ClusterConfig
    keys: dict[str, str]  # by tenant

    @property
    def admin_url(self) -> str:
        return f"http://{self.config.router.admin.host}:{self.config.router.admin_port}"

    def client(self, tenant: str) -> httpx.Client:
        """A client with the tenant's key, or for an unknown tenant with a wrong one."""
        tls = self.config.router.tls
        assert tls is not None
        return httpx.Client(
            base_url=f"https://{self.config.router.host}:{self.config.router.port}",
            verify=make_pinned_context(tls.certificate),
            headers={"authorization": f"Bearer {self.keys.get(tenant, 'pl_of_nobody')}"},
            timeout=120,
        )


@contextlib.contextmanager
def tenants_router(cluster: RunningCluster, quotas: dict[str, object]) -> Iterator[TenantsRouter]:
    """The router, ready. Its tenants, those that `quotas` names, may use the adapters of cluster.yaml."""
    root = cluster.logs.parent / "tenants"
    issued(authority(root), "router", "tenants", stem="router")
    config = cluster.config.model_copy(
        update={
            "router": RouterConfig.model_validate(
                {
                    "port": free_port(),
                    "admin": {"port": free_port()},
                    "auth": {},
                    "quotas": quotas,
                    "tls": {"certificate": str(root / "router.crt"), "key": str(root / "router.key")},
                    "management": True,
                }
            )
        }
    )
    path = cluster.logs.parent / "tenants.yaml"  # beside cluster.yaml, and so with its catalog and store
    dump_cluster_config(config, path)
    assert config.router.quotas is not None
    router = TenantsRouter(config, _keys(config.catalog.url, config.router.quotas.tenants))
    with (root / "router.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "router", "--config", str(path)], stdout=output, stderr=output
        )
    try:
        ends_at = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(router):
            assert process.poll() is None, (root / "router.log").read_text()
            assert time.monotonic() < ends_at, (root / "router.log").read_text()
            time.sleep(0.1)
        yield router
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()  # nothing, once it has ended


def _keys(catalog_url: str, tenants: Iterable[str]) -> dict[str, str]:
    catalog = SqlCatalog.open(catalog_url)
    keys = {}
    try:
        for tenant in tenants:
            _, keys[tenant] = catalog.keys.create(tenant, "test", SCOPES, expires_at=None, by="test")
            for permission in Permission:
                catalog.grants.add(Grant("default", None, tenant, permission), by="test")
    finally:
        catalog.close()
    return keys


def _is_ready(router: TenantsRouter) -> bool:
    try:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(router.client(tenant)) for tenant in router.keys]
            return httpx.get(f"{router.admin_url}/ready", timeout=2).status_code == 200 and all(
                client.get("/v1/models").status_code == 200 for client in clients
            )
    except httpx.HTTPError:
        return False
