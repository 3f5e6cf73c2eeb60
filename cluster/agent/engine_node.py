"""A node, other than the first, of a decode engine that spans several: runs ranks only, no agent and no HTTP server.

The first node's agent represents the worker. Ranks that lose each other cannot reconnect, so when any of them ends,
this process ends, and through the broken connections the other nodes do, too. Whoever started them must restart all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from cluster.agent.engine_spec import base_model_of, fitted_spec, other_node
from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.control.http import serve_worker_http
from cluster.control.worker_state import WorkerStateHub
from cluster.errors import ConfigError
from engine.errors import EngineError, EngineUnreachable
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
        # No watch for hangs: when a rank hangs the first node's ranks wait for it, and its agent ends them.
        self._supervisor = EngineSupervisor(self.spec, config.engine_of(name).start_timeout_s, self._engine_changed)

    async def engine_metrics(self) -> bytes:
        """Not available here: the first node has the engine's metrics."""
        raise EngineUnreachable(f"this is a node of the engine at {self._first}, which has the metrics")

    async def run(self) -> None:
        """Run the ranks until they end; after SIGTERM or SIGINT, until the first node has drained and ended them."""
        async with serve_worker_http(self):
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
