"""The agent of a prefill worker: holds adapters, warms its pairs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from adapters.base_model import BaseModel
from adapters.catalog.static import StaticCatalog
from adapters.formats import Limits
from cluster import control_pb2 as pb
from cluster.config import ClusterConfig
from cluster.worker_agent import WorkerAgent
from cluster.worker_watch import WorkerWatch
from engine.errors import EngineError, EngineUnreachable
from prefill_worker.pair_warmer import warm_pair
from prefill_worker.residency import Residency

log = logging.getLogger(__name__)

_RETRY_S = 1.0


class PrefillAgent(WorkerAgent):
    """A worker that applies adapters and ships KV."""

    role = "prefill"
    peer_role = "decode"

    def __init__(self, config: ClusterConfig, name: str, scratch: Path) -> None:
        super().__init__(config, name, scratch)
        base = BaseModel.read(config.model.path)
        limits = Limits(
            max_rank=config.adapter_limits.max_rank,
            max_bytes=config.adapter_limits.max_bytes,
            target_modules=config.adapter_limits.target_modules,
        )
        catalog = StaticCatalog.load({name: entry.path for name, entry in config.adapters.items()}, base, limits)
        self._residency = Residency(
            {entry.revision.revision_id: entry.revision for entry in catalog.list() if entry.revision is not None},
            base,
            limits,
            config.model.dtype,
            scratch / "adapters",
            self.hub,
            self.metrics,
        )
        self._warm: dict[str, str] = {}  # decode worker -> its incarnation that we are warm with

    def missing_pairs(self) -> list[str]:
        up = {peer.name for peer in self.peers.values() if _incarnation_of(peer)}
        missing = sorted(name for name in up if not self._is_warm(self.peers[name]))
        return missing or ([] if self._warm_pairs() else ["any decode worker"])

    def engine_gone(self) -> None:
        self._warm.clear()
        self._residency.engine_gone()
        self._publish()

    async def ensure_adapter(self, revision_id: str, deadline_s: float) -> float:
        if self.hub.state.engine_state != pb.ENGINE_STATE_UP:
            raise EngineUnreachable(f"the engine of {self.name} is not up")
        load_s = await self._residency.ensure(revision_id, self.engine)
        self.metrics.resident_adapters.set(len(self.hub.resident))
        return load_s

    async def run_role(self) -> None:
        """Warm every decode engine that is up, again whenever it or ours is a new one."""
        async with asyncio.TaskGroup() as group:
            for peer in self.peers.values():
                group.create_task(self._keep_warm(peer), name=f"warm {peer.name}")

    async def _keep_warm(self, peer: WorkerWatch) -> None:
        description = self.describe()
        while True:
            ours, theirs = self.incarnation, _incarnation_of(peer)
            if ours and theirs and not self._is_warm(peer):
                try:
                    await warm_pair(
                        self.engine, description.kv_host, description.kv_bootstrap_port, description.model, peer
                    )
                except EngineError as error:
                    log.warning("pair is not warm yet", extra={"fields": {"decode": peer.name, "error": str(error)}})
                else:
                    if ours == self.incarnation:
                        self._warm[peer.name] = theirs
                        self._publish()
                        self.reconsider()
                        continue
                await asyncio.sleep(_RETRY_S)
            else:
                await asyncio.sleep(0.2)

    def _is_warm(self, peer: WorkerWatch) -> bool:
        return self._warm.get(peer.name) == _incarnation_of(peer)

    def _warm_pairs(self) -> list[pb.WarmPair]:
        return [pb.WarmPair(decode_name=name, decode_incarnation=seen) for name, seen in sorted(self._warm.items())]

    def _publish(self) -> None:
        self.hub.update(warm_pairs=self._warm_pairs())
        self.metrics.warm_pairs.set(len(self._warm))


def _incarnation_of(peer: WorkerWatch) -> str:
    """Of the peer's engine, empty unless it is up."""
    state = peer.state
    return state.incarnation if state is not None and state.engine_state == pb.ENGINE_STATE_UP else ""
