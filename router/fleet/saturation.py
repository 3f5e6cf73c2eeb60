"""How busy each pool of the fleet is, as numbers for an autoscaler."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from router.fleet.fleet_state import FleetState
from router.fleet.queues import decode_share
from router.metrics import Metrics

ROLES = ("prefill", "decode", "unified")


@dataclass(frozen=True, slots=True)
class Saturation:
    """One router's view of its placeable workers. `decode_…` comes from engines' reports: all routers agree on it."""

    num_placeable: dict[str, int]  # by role
    queue_s: dict[str, float]  # by worker that reads prompts: seconds until what this router has placed there is read
    prefill_queue_s: float  # the mean of that, without what waits for decode workers
    kv_used: dict[str, float]  # by worker that generates, and reports its KV memory: share in use or promised
    decode_kv_used: float  # the mean of that
    decode_queue: float  # sequences that wait for memory at decode workers because others generate there
    decode_load: float  # share of decode workers' capacity that generating sequences use; above 1 with what waits
    prefill_decode_ratio: float  # of workers that the demand keeps busy; 0 while nothing is generated

    @classmethod
    def of(cls, fleet: FleetState, prefill_demand: float = 0.0) -> Self:
        """`prefill_demand`: prefill workers that this router's prompts keep busy."""
        decode_demand = decode_load(fleet) * len(fleet.decodes)
        generating = (*fleet.decodes, *(worker for worker in fleet.readers if worker.role == "unified"))
        loads = {worker.name: fleet.loads[worker.name] for worker in generating}
        roles = Counter(worker.role for worker in (*fleet.readers, *fleet.decodes))
        kv_used = {name: load.used_kv_tokens / load.max_kv_tokens for name, load in loads.items() if load.max_kv_tokens}
        return cls(
            {role: roles[role] for role in ROLES},
            {worker.name: fleet.loads[worker.name].queue_s for worker in fleet.readers},
            prefill_queue_s(fleet),
            kv_used,
            mean(kv_used.values()),
            sum(fleet.loads[worker.name].queues.waiting_for_decode for worker in fleet.decodes),
            decode_load(fleet),
            prefill_demand / decode_demand if decode_demand else 0.0,
        )

    def show(self, metrics: Metrics) -> None:
        """Set the metrics, and drop those of workers that have left."""
        for role, number in self.num_placeable.items():
            metrics.placeable_workers.labels(role).set(number)
        for gauge, values in ((metrics.worker_queue, self.queue_s), (metrics.worker_kv_used, self.kv_used)):
            gauge.clear()
            for worker, value in values.items():
                gauge.labels(worker).set(value)
        metrics.decode_kv_used.set(self.decode_kv_used)
        metrics.prefill_queue.set(self.prefill_queue_s)
        metrics.decode_queue.set(self.decode_queue)
        metrics.decode_load.set(self.decode_load)
        metrics.prefill_decode_ratio.set(self.prefill_decode_ratio)


def prefill_queue_s(fleet: FleetState) -> float:
    """Mean expected seconds until this router's queued prompts are read, without waits for decode workers."""
    share = decode_share(fleet.loads[worker.name].queues for worker in fleet.decodes)
    return mean([load.queue_s * (1 - share * load.queues.blocked_share) for load in fleet.reader_loads])


def decode_load(fleet: FleetState) -> float:
    """Mean share of the decode workers' capacity that generating sequences use; above 1 if others wait for memory."""
    loads = [fleet.loads[worker.name] for worker in fleet.decodes]
    return mean([load.queues.load_ratio(load.max_kv_tokens) for load in loads])


def mean(values: Collection[float]) -> float:
    """The mean of the values, 0 if there are none."""
    return sum(values) / len(values) if values else 0.0
