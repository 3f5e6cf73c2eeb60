"""A router that finds stand-ins of workers while it runs: by the addresses of a DNS name per role."""

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from support.clusters.dns_server import DnsServer, dns_server
from support.constants import with_constants
from support.router_stand_ins import ClusterStandIn, WorkerStandIn, eventually, running_cluster

from cluster.config.discovery import DiscoveryConfig
from cluster.discovery.dns import DnsSource
from process.free_ports import free_port

_INTERVAL_S = 0.05
_ROLES = ("prefill", "decode", "unified")


@dataclass
class Found:
    """A router, and the workers that it may find."""

    cluster: ClusterStandIn
    stack: AsyncExitStack
    dns: DnsServer
    control_port: int
    num_workers: int = 0

    async def worker(self, name: str, role: str = "unified") -> WorkerStandIn:
        """A worker that nobody knows yet, at an address of its own: that of an earlier one is lower."""
        self.num_workers += 1
        worker = WorkerStandIn(name, role)
        await worker.start(f"127.0.0.{100 + self.num_workers}", self.control_port)
        self.stack.push_async_callback(worker.stop)
        return worker

    async def names(self) -> dict[str, bool]:
        workers = (await self.cluster.admin("/ready"))[1]["workers"]
        return {name: worker["ready"] for name, worker in workers.items()}

    async def has(self, *ready: str, unready: Iterable[str] = (), within_s: float = 120.0) -> None:
        expected = dict.fromkeys(ready, True) | dict.fromkeys(unready, False)
        await eventually(self.names, lambda names: names == expected, within_s)

    async def series(self) -> set[str]:
        """The workers that the metrics name."""
        page = await self.cluster.metrics_page()
        return {line.split('worker="')[1].split('"')[0] for line in page.splitlines() if 'worker="' in line}

    def name(self, *workers: WorkerStandIn, role: str = "unified") -> None:
        """From now on DNS names these."""
        self.dns.set_addresses(f"{role}.example.org", [worker.address.partition(":")[0] for worker in workers])


@asynccontextmanager
async def finding_router(*, forget_after_s: float = 60, **config) -> AsyncIterator[Found]:
    async with dns_server() as server, AsyncExitStack() as stack:
        port = free_port()
        sources = [
            DnsSource(f"{role}.example.org", role, port=port, interval_s=_INTERVAL_S, nameservers=[server.nameserver])
            for role in _ROLES
        ]
        discovery = with_constants(DiscoveryConfig, forget_after_s=forget_after_s)
        async with running_cluster(0, 0, sources=sources, discovery=discovery, **config) as cluster:
            yield Found(cluster, stack, server, port)
