"""A simulated worker: an engine, and the adapters in its memory."""

from __future__ import annotations

from dataclasses import dataclass

from bench.simulator.adapter_memory import AdapterMemory
from bench.simulator.attempt import Attempt
from bench.simulator.engine import Engine
from router.fleet.fleet_state import WorkerView

INCARNATION = "1"  # of all workers: none of them ends


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """Prefill, decode or unified."""

    name: str
    role: str
    memory: AdapterMemory[Attempt]
    engine: Engine

    def view(self, warm_pairs: frozenset[tuple[str, str]]) -> WorkerView:
        """As routers see it."""
        return WorkerView(
            self.name,
            self.role,
            domain="",
            incarnation=INCARNATION,
            is_connected=True,
            is_engine_up=True,
            is_ready=True,
            warm_pairs=warm_pairs if self.role == "prefill" else frozenset(),
            residency=self.memory.residency,
        )
