"""A node, other than the first, of a decode engine that spans several: runs ranks only, no agent and no HTTP server.

The first node's agent represents the worker. Where no DNS name has all KV peers, this process looks for them itself: by
their addresses only, since it has no certificate to ask them with. Ranks that lose each other cannot reconnect, so when
any of them ends, this process ends, and through the broken connections the other nodes do, too. Whoever started them
must restart all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from cluster.agent.engine_spec import PEER_ROLES, base_model_of, fitted_spec, other_node
from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.control.http import serve_worker_http
from cluster.control.worker_state import WorkerStateHub
from cluster.discovery.hosts import FoundHosts
from cluster.errors import ConfigError
from engine.errors import EngineError, EngineUnreachable
from engine.kv_peers import write_found_peers
from engine.supervisor import EngineSnapshot, EngineStatus, EngineSupervisor
from process.lifetime import stop_signal

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_STOP_LIMIT_S = 12.0


class EngineNode:
    """The ranks of one node. Serves `/health`, and `/ready` once its ranks have joined the others and are up."""

    def __init__(self, config: ClusterConfig, name: str, scratch: Path, rank: int, first: str) -> None:
        """`first`: the host of the first node. Raises ConfigError if the worker has no such node."""
        self.name = name
        self.worker = config.workers[name]
        if not 1 <= rank < self.worker.nodes:
            raise ConfigError(
                f"--node-rank: {name} has nodes: {self.worker.nodes}, so expected 1 to {self.worker.nodes - 1} beside "
                f"the worker itself (found {rank})"
            )
        self.hub = WorkerStateHub()
        self.registry = CollectorRegistry()
        self._first = first
        self._drain_timeout_s = config.drain_timeout_of(name)
        spec = fitted_spec(config, name, scratch / "engine", base_model_of(config))
        self.spec = other_node(spec, self.worker, rank, first)
        self._kv_peers: FoundHosts | None = None
        if self.spec.kv_found_peers is not None:
            self._kv_peers_changed(frozenset())  # those of an earlier process may be gone
            self._kv_peers = FoundHosts(config.discovery, PEER_ROLES[self.worker.role], self._kv_peers_changed)
        # No watch for hangs: when a rank hangs the first node's ranks wait for it, and its agent ends them.
        self._supervisor = EngineSupervisor(self.spec, config.engine_of(name).start_timeout_s, self._engine_changed)

    async def engine_metrics(self) -> bytes:
        """Not available here: the first node has the engine's metrics."""
        raise EngineUnreachable(f"this is a node of the engine at {self._first}, which has the metrics")

    async def run(self) -> None:
        """Run the ranks until they end; after SIGTERM or SIGINT, until the first node has drained and ended them."""
        async with serve_worker_http(self), self._finding_kv_peers():
            engine = asyncio.create_task(self._supervisor.run(), name="engine")
            stop = stop_signal()
            running: list[asyncio.Future[Any]] = [engine, stop]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            is_asked = stop.done()
            if is_asked:
                log.info("waiting for the first node to stop")
                self.hub.update(draining=True)
                await self._wait_for_first_node(engine)
            asyncio.get_running_loop().call_later(_STOP_LIMIT_S, os._exit, 1)
            engine.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError):  # which the supervisor has logged
                await engine
            if not is_asked:
                raise SystemExit(1)

    @contextlib.asynccontextmanager
    async def _finding_kv_peers(self) -> AsyncIterator[None]:
        if self._kv_peers is None:
            yield
            return
        finding = asyncio.create_task(self._kv_peers.run(), name="KV peers")
        try:
            yield
        finally:
            finding.cancel()
            await asyncio.gather(finding, return_exceptions=True)

    def _kv_peers_changed(self, hosts: frozenset[str]) -> None:
        assert self.spec.kv_found_peers is not None
        write_found_peers(self.spec.kv_found_peers, hosts)

    async def _wait_for_first_node(self, engine: asyncio.Task[None]) -> None:
        """Return once the rendezvous port is closed: until then the first node has requests in flight."""
        deadline = time.monotonic() + self._drain_timeout_s
        while time.monotonic() < deadline and not engine.done():
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    _, writer = await asyncio.open_connection(self._first, self.worker.rendezvous_port)
                writer.close()
            except OSError:  # a TimeoutError, too
                return
            await asyncio.wait({engine}, timeout=_LOOK_EVERY_S)

    def _engine_changed(self, snapshot: EngineSnapshot) -> None:
        is_up = snapshot.status is EngineStatus.UP
        self.hub.update(
            engine_state=pb.ENGINE_STATE_UP if is_up else pb.ENGINE_STATE_DOWN, ready=is_up, reason=snapshot.reason
        )
