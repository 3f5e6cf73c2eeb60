"""What the agents of all workers that hold adapters have in common: the revisions that their engine can use."""

from __future__ import annotations

from pathlib import Path

from adapters.base_model import BaseModel
from adapters.catalog.static import StaticCatalog
from adapters.formats import Limits
from cluster import control_pb2 as pb
from cluster.config import ClusterConfig
from cluster.worker_agent import WorkerAgent
from engine.errors import EngineUnreachable
from prefill_worker.residency import Residency


class AdapterHolder(WorkerAgent):
    """A worker that applies adapters."""

    served_positions: frozenset[str]  # of the adapters that this role can apply

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
            self.served_positions,
            scratch / "adapters",
            self.hub,
            self.metrics,
        )

    def engine_gone(self) -> None:
        self._residency.engine_gone()

    async def ensure_adapter(self, revision_id: str, deadline_s: float) -> float:
        if self.hub.state.engine_state != pb.ENGINE_STATE_UP:
            raise EngineUnreachable(f"the engine of {self.name} is not up")
        load_s = await self._residency.ensure(revision_id, self.engine)
        self.metrics.resident_adapters.set(len(self.hub.resident))
        return load_s
