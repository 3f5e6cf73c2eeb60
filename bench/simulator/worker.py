"""A simulated worker: an engine, and the adapters in its memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.simulator.adapter_memory import AdapterMemory
from bench.simulator.engine import Engine
from router.fleet.fleet_state import WorkerView

_INCARNATION = "1"


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """Prefill, decode or unified."""

    name: str
    role: str
    engine: Engine
    memory: AdapterMemory

    def view(self, decodes: Iterable[str]) -> WorkerView:
        """As routers see it, beside these decode workers."""
        return WorkerView(
            self.name,
            self.role,
            incarnation=_INCARNATION,
            is_connected=True,
            is_engine_up=True,
            is_ready=True,
            warm_pairs=frozenset((each, _INCARNATION) for each in decodes if self.role == "prefill"),
            residency=self.memory.residency,
        )
