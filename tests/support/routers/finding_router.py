"""A router that finds stand-ins of workers while it runs: by the SRV records of a name per role, or by Kubernetes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from support.chart.watched_kubernetes import KubernetesApiDouble, kubeconfig, kubernetes_api
from support.clusters.dns_server import DnsServer, dns_server
from support.constants import with_constants
from support.router_stand_ins import ClusterStandIn, WorkerStandIn, eventually, running_cluster

from cluster.config.discovery import DiscoveryConfig, KubernetesDiscovery
from cluster.discovery.dns import DnsSource
from cluster.discovery.kubernetes_source import KubernetesSource

_INTERVAL_S = 0.05
_ROLES = ("prefill", "decode", "unified")


@dataclass
class Following:
    """A router, and the workers that it may find."""

    cluster: ClusterStandIn
    stack: AsyncExitStack

    async def worker(self, name: str, role: str = "unified", host: str = "127.0.0.1") -> WorkerStandIn:
        """A worker that nobody knows yet."""
        worker = WorkerStandIn(name, role)
        await worker.start(host)
        self.stack.push_async_callback(worker.stop)
        return worker

    async def names(self) -> dict[str, bool]:
        workers = (await self.cluster.admin("/ready"))[1]["workers"]
        return {name: worker["ready"] for name, worker in workers.items()}

    async def has(self, *ready: str, unready: Iterable[str] = (), within_s: float = 30) -> None:
        expected = dict.fromkeys(ready, True) | dict.fromkeys(unready, False)
        await eventually(self.names, lambda names: names == expected, within_s)

    async def publish(self, *workers: WorkerStandIn) -> None:
        """From now on these unified workers are named."""
        raise NotImplementedError

    async def series(self) -> set[str]:
        """The workers that the metrics name."""
        page = await self.cluster.metrics_page()
        return {line.split('worker="')[1].split('"')[0] for line in page.splitlines() if 'worker="' in line}


@dataclass
class Found(Following):
    """It finds them by DNS."""

    dns: DnsServer

    def name(self, *workers: WorkerStandIn, role: str = "unified") -> None:
        """From now on DNS names these."""
        self.dns.set_services(srv(role), [worker.address for worker in workers])

    async def publish(self, *workers: WorkerStandIn) -> None:
        self.name(*workers)


@dataclass
class FoundByKubernetes(Following):
    """It finds them by Services, one for each role."""

    api: KubernetesApiDouble

    async def publish(self, *workers: WorkerStandIn, role: str = "unified") -> None:
        """From now on slices of the Service name these."""
        await self.api.set_service(role, [worker.address for worker in workers])


def srv(role: str) -> str:
    return f"_control._tcp.{role}.example.org"


@asynccontextmanager
async def finding_router(*, forget_after_s: float = 60, **config) -> AsyncIterator[Found]:
    async with dns_server() as server, AsyncExitStack() as stack:
        for role in _ROLES:
            server.set_services(srv(role), [])
        sources = [
            DnsSource(srv(role), role, interval_s=_INTERVAL_S, nameservers=[server.nameserver]) for role in _ROLES
        ]
        discovery = with_constants(DiscoveryConfig, forget_after_s=forget_after_s)
        async with running_cluster(0, 0, sources=sources, discovery=discovery, **config) as cluster:
            yield Found(cluster, stack, server)


@asynccontextmanager
async def kubernetes_router(
    folder: Path, *, pause: Callable[[float], Awaitable[None]] = asyncio.sleep, grace_s: float = 0.05, **config
) -> AsyncIterator[FoundByKubernetes]:
    """The same with the official Kubernetes client. `pause`: the clock between two attempts to reach the API server."""
    async with kubernetes_api() as api, AsyncExitStack() as stack:
        sources = [
            KubernetesSource(
                KubernetesDiscovery(service=role),
                role,
                kubeconfig=kubeconfig(api, folder),
                only_ready=True,
                pause=pause,
                grace_s=grace_s,
            )
            for role in _ROLES
        ]
        async with running_cluster(0, 0, sources=sources, **config) as cluster:
            yield FoundByKubernetes(cluster, stack, api)
