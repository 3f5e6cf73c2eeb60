"""Agent of a unified worker, whose one engine prefills with adapters and decodes without."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from cluster.config.schema import ClusterConfig
from engine.errors import EngineError
from prefill_worker.adapter_holder import AdapterHolder
from prefill_worker.warm_up import warm_engine

log = logging.getLogger(__name__)

_RETRY_S = 1.0


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
                await asyncio.sleep(0.2)
