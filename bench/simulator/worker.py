"""A simulated worker: an engine, the adapters in its memory, and the attempts that it has."""

from __future__ import annotations

from collections.abc import Callable

from bench.simulator.adapter_memory import AdapterMemory, LoadModel
from bench.simulator.attempt import Attempt
from bench.simulator.clock import Clock
from bench.simulator.curves import EngineTimes
from bench.simulator.engine import Engine
from router.fleet.fleet_state import Holders, WorkerView


class Worker:
    """Prefill, decode or unified. What happens to attempts is told to the fleet's callbacks."""

    def __init__(
        self,
        name: str,
        role: str,
        rack: str,
        clock: Clock,
        loads: LoadModel,
        holders: Holders,
        new_engine: Callable[[], Engine],
        on_resident: Callable[[Attempt], None],
    ) -> None:
        self.name, self.role, self.rack = name, role, rack
        self.memory: AdapterMemory[Attempt] = AdapterMemory(loads, clock, holders, on_resident)
        self.attempts: dict[Attempt, None] = {}  # that need this worker still
        self.is_up = True
        self.is_known_up = True  # to the routers
        self.incarnation = 1
        self._new_engine = new_engine
        self.engine = new_engine()
        self.past: list[Engine] = []  # earlier lives

    def die(self) -> None:
        """All that it has is lost. Its attempts stay listed, for those who depend on them."""
        self.is_up = False
        self.engine.stop()
        self.memory.lose()

    def come_back(self, role: str | None = None) -> None:
        """A new engine, and empty memory."""
        assert not self.is_up, "its attempts would never end"
        self.past.append(self.engine)
        self.engine = self._new_engine()
        self.role = role or self.role
        self.is_up = self.is_known_up = True
        self.incarnation += 1

    def view(self, warm_pairs: frozenset[tuple[str, str]]) -> WorkerView:
        """As routers see it."""
        return WorkerView(
            self.name,
            self.role,
            domain="",
            incarnation=str(self.incarnation),
            is_connected=self.is_known_up,
            is_engine_up=self.is_known_up,
            is_ready=self.is_known_up,
            warm_pairs=warm_pairs if self.role == "prefill" else frozenset(),
            residency=self.memory.residency,
        )

    @property
    def engines(self) -> list[Engine]:
        """Of all its lives."""
        return [*self.past, self.engine]


def engine_factory(
    times: EngineTimes,
    clock: Clock,
    on_read: Callable[[Attempt], None],
    on_first: Callable[[Attempt], None],
    on_end: Callable[[Attempt], None],
) -> Callable[[], Engine]:
    return lambda: Engine(times, clock, on_read, on_first, on_end)
