"""A simulated worker's host memory: cold loads, least-recently-used eviction, reports to the router."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from bench.simulator.attempt import Attempt
from bench.simulator.clock import Clock
from bench.simulator.curves import Loads
from cluster.control import control_pb2 as pb
from router.fleet.fleet_state import Holders, WorkerResidency

_REPORT_DELAY_S = 0.02  # until the routers know of a change


class AdapterMemory:
    """The adapters of one worker. Attempts wait here for theirs."""

    def __init__(
        self, loads: Loads, host_adapters: int, clock: Clock, holders: Holders, on_resident: Callable[[Attempt], None]
    ) -> None:
        """`host_adapters`: how many fit."""
        self.residency = WorkerResidency(holders)
        self.num_loads = 0
        self._loads, self._host_adapters, self._clock, self._on_resident = loads, host_adapters, clock, on_resident
        self._host: OrderedDict[str, None] = OrderedDict()
        self._waiting: dict[str, list[Attempt]] = {}  # for the load of their revision
        self._load_queue: deque[str] = deque()
        self._num_loading = 0
        self._last_end_s = 0.0  # of the loads begun so far

    def ensure(self, revision_id: str, attempt: Attempt) -> bool:
        """Call `on_resident` once the revision is in host memory, at once if it is. Returns whether it was."""
        if revision_id in self._host:
            self._host.move_to_end(revision_id)
            self._on_resident(attempt)
            return True
        waiting = self._waiting.get(revision_id)
        if waiting is not None:
            waiting.append(attempt)
        else:
            self._waiting[revision_id] = [attempt]
            self._load_queue.append(revision_id)
            self._load()
        return False

    def fill(self, revision_ids: Iterable[str]) -> None:
        """Make these, which fit, resident now, as if they had been loaded before."""
        ids = list(revision_ids)
        self._host.update(dict.fromkeys(ids))
        self.residency.apply(pb.ResidencyDelta(resident=ids))

    def _load(self) -> None:
        loads, clock = self._loads, self._clock
        while self._load_queue and self._num_loading < loads.parallel:
            revision_id = self._load_queue.popleft()
            self._num_loading += 1
            self.num_loads += 1
            end_s = max(clock.now + loads.store_ms / 1000, self._last_end_s + loads.serial_ms / 1000)
            self._last_end_s = end_s
            clock.after(end_s - clock.now, self._loaded, revision_id)

    def _loaded(self, revision_id: str) -> None:
        self._num_loading -= 1
        self._host[revision_id] = None
        evicted = [self._host.popitem(last=False)[0]] if len(self._host) > self._host_adapters else []
        delta = pb.ResidencyDelta(resident=[revision_id], evicted=evicted)
        self._clock.after(_REPORT_DELAY_S, self.residency.apply, delta)
        for attempt in self._waiting.pop(revision_id):
            self._on_resident(attempt)
        self._load()
