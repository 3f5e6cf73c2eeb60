"""Agent of a unified worker, whose one engine prefills with adapters and decodes without."""

import asyncio
import contextlib
import logging
from pathlib import Path

from adapters.errors import AdapterError
from cluster.config.schema import ClusterConfig
from engine.errors import EngineError
from engine.hooks.report import read_lacking
from prefill_worker.adapter_holder import AdapterHolder
from prefill_worker.warm_up import warm_engine

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_POLL_S = 0.2
_LOAD_AGAIN_TIMEOUT_S = 30.0


class UnifiedAgent(AdapterHolder):
    """Agent of a worker without peers, the only kind that serves adapters for all positions."""

    role = "unified"
    peer_role = None
    served_positions = frozenset({"prefill", "all"})

    def __init__(self, config: ClusterConfig, name: str, scratch: Path) -> None:
        super().__init__(config, name, scratch)
        self._warm = ""  # incarnation of the warm engine

    def why_not_warm(self) -> str:
        return "" if self._warm == self.incarnation else "its engine is not warm yet"

    def engine_suspected(self) -> None:
        self._warm = ""

    async def run_role(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._warm_up(), name="warm-up")
            group.create_task(self._load_again(), name="adapters of retracted requests")

    async def _warm_up(self) -> None:
        """Warm up every new engine before it serves requests."""
        while True:
            ours = self.incarnation
            if ours and self._warm != ours:
                try:
                    await warm_engine(self.engine, self.spec.served_name)
                except EngineError as error:
                    log.warning("engine warm-up failed; retrying", extra={"fields": {"error": str(error)}})
                else:
                    self._warm = ours
                    self.reconsider()
                    continue
                await asyncio.sleep(_RETRY_S)
            else:
                await asyncio.sleep(_POLL_S)

    async def _load_again(self) -> None:
        """Load the adapters that retracted requests wait for: the engine lets go of them once a prompt is read."""
        waiting: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                waiting = {rid: task for rid, task in waiting.items() if not task.done()}
                for rid, revision_id in read_lacking(self.spec.report_dir).items():
                    if rid not in waiting:
                        waiting[rid] = group.create_task(self._load_for(rid, revision_id), name=f"load for {rid}")
                await asyncio.sleep(_POLL_S)

    async def _load_for(self, rid: str, revision_id: str) -> None:
        """Load a retracted request's adapter. Abort the request if that cannot succeed."""
        try:
            await self._now(for_loads=True).ensure(revision_id, _LOAD_AGAIN_TIMEOUT_S)
        except (AdapterError, EngineError, TimeoutError) as error:
            fields = {"rid": rid, "revision": revision_id, "error": str(error)}
            log.warning("retracted request waits for its adapter", extra={"fields": fields})
            if isinstance(error, AdapterError) and not error.retryable:
                with contextlib.suppress(EngineError):
                    await self.engine.abort(rid)
