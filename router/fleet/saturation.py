"""How busy each pool of the fleet is, as numbers for an autoscaler."""

from collections import Counter
from collections.abc import Collection

from router.fleet.fleet_state import FleetState
from router.fleet.queues import decode_share
from router.metrics import Metrics

ROLES = ("prefill", "decode", "unified")


def show_saturation(fleet: FleetState, metrics: Metrics, prefill_demand: float = 0.0) -> None:
    """Set the metrics to one router's view of its placeable workers, and drop those of workers that have left.

    `prefill_demand`: prefill workers that this router's prompts keep busy.
    """
    roles = Counter(worker.role for worker in (*fleet.readers, *fleet.decodes))
    for role in ROLES:
        metrics.placeable_workers.labels(role).set(roles[role])
    metrics.worker_queue.clear()
    for worker in fleet.readers:
        metrics.worker_queue.labels(worker.name).set(fleet.loads[worker.name].queue_s)
    metrics.worker_kv_used.clear()
    kv_used = []
    for worker in (*fleet.decodes, *(reader for reader in fleet.readers if reader.role == "unified")):
        load = fleet.loads[worker.name]
        if load.max_kv_tokens:
            kv_used.append(load.used_kv_tokens / load.max_kv_tokens)
            metrics.worker_kv_used.labels(worker.name).set(kv_used[-1])
    metrics.decode_kv_used.set(mean(kv_used))
    metrics.prefill_queue.set(prefill_queue_s(fleet))
    metrics.decode_queue.set(sum(fleet.loads[worker.name].queues.waiting_for_decode for worker in fleet.decodes))
    load_ratio = decode_load(fleet)
    metrics.decode_load.set(load_ratio)
    decode_demand = load_ratio * len(fleet.decodes)
    metrics.prefill_decode_ratio.set(prefill_demand / decode_demand if decode_demand else 0.0)


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
