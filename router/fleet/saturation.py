"""How busy each pool of the fleet is, as numbers for an autoscaler."""

from collections import Counter
from collections.abc import Collection

from router.fleet.fleet_state import FleetState
from router.fleet.queues import decode_share
from router.metrics import Metrics

ROLES = ("prefill", "decode", "unified")

Waiting = tuple[int, float]  # requests that wait in this router for their turn, and tokens of their prompts
NONE_WAITS: Waiting = (0, 0.0)


def show_saturation(
    fleet: FleetState, metrics: Metrics, prefill_demand: float = 0.0, waiting: Waiting = NONE_WAITS
) -> None:
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
    unread_s, num_waiting, waiting_share = turns_wait_for(fleet, waiting)
    metrics.prefill_queue.set(prefill_queue_s(fleet) + unread_s)
    queued = [fleet.loads[worker.name].queues.waiting_for_decode for worker in fleet.decodes]
    metrics.decode_queue.set(sum(queued) + num_waiting)
    load_ratio = decode_load(fleet) + waiting_share
    metrics.decode_load.set(load_ratio)
    decode_demand = load_ratio * len(fleet.decodes)
    metrics.prefill_decode_ratio.set(prefill_demand / decode_demand if decode_demand else 0.0)


def turns_wait_for(fleet: FleetState, waiting: Waiting) -> tuple[float, int, float]:
    """What requests in the router wait for: seconds until their prompts are read, or else so many for decode workers.

    These also as a share of what the decode workers run at a time.
    """
    num_waiting, prompt_tokens = waiting
    decodes = [fleet.loads[worker.name] for worker in fleet.decodes]
    most = [load.queues.max_running for load in decodes]
    if decodes and all(
        0 < number <= max(load.num_sequences, load.queues.requests) for load, number in zip(decodes, most, strict=True)
    ):
        return 0.0, num_waiting, num_waiting / sum(most)
    tokens_per_s = sum(load.tokens_per_s for load in fleet.reader_loads)
    return (prompt_tokens / tokens_per_s if tokens_per_s else 0.0), 0, 0.0


def prefill_queue_s(fleet: FleetState) -> float:
    """Mean expected seconds until this router's prompts at workers are read, without waits for decode workers."""
    share = decode_share(fleet.loads[worker.name].queues for worker in fleet.decodes)
    return mean([load.queue_s * (1 - share * load.queues.blocked_share) for load in fleet.reader_loads])


def decode_load(fleet: FleetState) -> float:
    """Mean share of the decode workers' capacity that generating sequences use; above 1 if others wait for memory."""
    loads = [fleet.loads[worker.name] for worker in fleet.decodes]
    return mean([load.queues.load_ratio(load.max_kv_tokens) for load in loads])


def mean(values: Collection[float]) -> float:
    """The mean of the values, 0 if there are none."""
    return sum(values) / len(values) if values else 0.0
