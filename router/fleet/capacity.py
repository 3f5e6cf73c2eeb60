"""Whether any placeable worker can take one more request soon."""

from router.fleet.fleet_state import FleetState


def has_capacity(
    fleet: FleetState,
    now: float,
    *,
    queue_s: float,
    worker_sequences: int,
    coming_tokens: float,
    coming_sequences: float,
) -> bool:
    """Whether some worker has capacity. True without any worker, so that requests fail immediately instead of waiting.

    A worker has capacity if it should have read its queued prompts within `queue_s` and runs fewer than
    `worker_sequences` sequences of this router. Admitted requests that are not placed yet are counted against the first
    such workers. Stops at the first worker with capacity beyond them.
    """
    readers, decodes = fleet.readers, fleet.decodes
    if not readers:
        return True
    sequences_each = coming_sequences / len(readers)
    can_decode: bool | None = None
    for worker, load in zip(readers, fleet.reader_loads, strict=True):
        if (left_s := load.left_s(now)) >= queue_s:
            continue
        if worker.role == "unified":
            if load.num_sequences + sequences_each >= worker_sequences:
                continue
        else:
            if can_decode is None:
                each = coming_sequences / len(decodes) if decodes else 0.0
                can_decode = not decodes or any(
                    fleet.loads[decode.name].num_sequences + each < worker_sequences for decode in decodes
                )
            if not can_decode:
                continue
        if coming_tokens <= 0:
            return True
        coming_tokens -= (queue_s - left_s) / load.s_per_token
    return False
