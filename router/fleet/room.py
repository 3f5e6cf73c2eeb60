"""Whether any placeable worker can take one more request soon."""

from __future__ import annotations

from router.fleet.fleet_state import FleetState


def has_room(
    fleet: FleetState, *, queue_s: float, worker_sequences: int, coming_tokens: float, coming_sequences: float
) -> bool:
    """True also without any worker: such requests fail at once instead of waiting.

    A worker has room that would read its prompts within `queue_s` and has fewer than `worker_sequences` of this
    router's. Prompts that are on their way to no worker yet fill the room of the first ones. Ends at the first worker
    with room beyond them.
    """
    readers, decodes = fleet.readers, fleet.decodes
    if not readers:
        return True
    sequences_each = coming_sequences / len(readers)
    can_decode: bool | None = None
    for worker, load in zip(readers, fleet.reader_loads, strict=True):
        if load.queue_s >= queue_s:
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
        coming_tokens -= (queue_s - load.queue_s) / load.s_per_token
    return False
