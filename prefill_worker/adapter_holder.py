"""Base of the agents of workers that hold adapters: owns the residency and serves its control calls."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from adapters.files.locked_folder import sweep_abandoned
from adapters.store import Envelope
from cluster.agent.worker_agent import WorkerAgent
from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.errors import StartError
from cluster.host_memory import SHARED_MEMORY, with_fitted_default
from cluster.integrity import trust_of
from cluster.open_library import limits_of, open_store_of_workers
from engine.errors import EngineUnreachable
from prefill_worker.residency import Acceptance, Residency
from prefill_worker.residency.metrics import ResidencyMetrics
from prefill_worker.residency.residency import FOLDERS
from process.tracing.span import Span


class AdapterHolder(WorkerAgent):
    """Agent of a worker that applies adapters. Requests name revisions, so it needs the store but no catalog."""

    served_positions: frozenset[str]  # adapter positions that this role can apply

    def __init__(self, config: ClusterConfig, name: str, scratch: Path) -> None:
        super().__init__(config, name, scratch)
        self.adapters = self
        self._acceptance = Acceptance(
            self.base, config.model.dtype, limits_of(config), self.served_positions, trust_of(config)
        )
        self._residency: Residency | None = None  # None unless the agent runs

    @contextlib.asynccontextmanager
    async def resources(self) -> AsyncIterator[None]:
        await asyncio.to_thread(sweep_abandoned, FOLDERS, SHARED_MEMORY)
        neighbours = [each for each in self.config.workers.values() if each.host == self.worker.host]
        num_holders = sum(self.config.may_be(each.role, "prefill", "unified") for each in neighbours)
        settings = with_fitted_default(self.config.residency, num_holders, SHARED_MEMORY)
        residency = Residency(
            self.name,
            settings,
            self.adapters_folder,
            lambda: open_store_of_workers(self.config),
            self._acceptance,
            self.engine,
            self.hub,
            ResidencyMetrics(self.metrics.registry, self.name, self.role),
            # The answer to an unload comes from the first rank; others may still read the file for a moment.
            reuses_folders=self.spec.tensor_parallel == 1,
        )
        try:
            try:
                await residency.open()
            except OSError as error:
                raise StartError(
                    f"worker {self.name} cannot use the folder {self.adapters_folder} for adapters ({error.strerror}); "
                    "set residency.disk_directory to one that it may write, on a disk with room"
                ) from error
            self._residency = residency
            yield
        finally:
            self._residency = None
            await residency.aclose()

    async def run_resources(self) -> None:
        assert self._residency is not None
        await self._residency.run()

    def engine_gone(self) -> None:
        if self._residency is not None:
            self._residency.engine_gone()

    def engine_up(self) -> None:
        if self._residency is not None:
            self._residency.engine_up()

    async def ensure_adapter(
        self, request: pb.EnsureAdapterRequest, deadline_s: float, span: Span
    ) -> pb.EnsureAdapterResponse:
        load_s = await self._now(for_loads=True).ensure(
            request.revision_id,
            deadline_s,
            is_prewarm=request.prewarm,
            not_in_engine=request.not_in_engine,
            tenant=request.tenant,
            span=span,
        )
        return pb.EnsureAdapterResponse(load_s=load_s)

    async def pin_adapter(self, revision_id: str, pinned: bool, deadline_s: float) -> None:
        if pinned:
            await self._now(for_loads=True).pin(revision_id, deadline_s)
        else:
            self._now(for_loads=False).unpin(revision_id)

    async def put_adapter(
        self, envelope: Envelope, path: str, content: AsyncIterator[bytes], deadline_s: float
    ) -> pb.PutAdapterResponse:
        was_pinned = await self._now(for_loads=True).put(envelope, content, deadline_s, path)
        return pb.PutAdapterResponse(was_pinned=was_pinned)

    async def evict_adapter(self, revision_id: str, from_disk: bool) -> bool:
        return await self._now(for_loads=False).evict(revision_id, from_disk)

    def _now(self, *, for_loads: bool) -> Residency:
        """The residency. Raises EngineUnreachable while the agent starts or stops, for loads while no engine is up."""
        is_up = self.hub.state.engine_state == pb.ENGINE_STATE_UP and not self.hub.state.hung
        if self._residency is None or (for_loads and not is_up):
            raise EngineUnreachable(f"the engine of {self.name} is not up")
        return self._residency
