"""Body of the hook into the KV room that a decode engine reserves for tokens to come."""

from __future__ import annotations

import itertools


def reserve_what_can_come(original, queue, n_active=None, extra_reserved_reqs=0):
    """Tokens of KV to keep free for the requests that the engine has taken.

    SGLang keeps `--num-reserved-decode-tokens` (512) for each, also for one that may generate 64 or has 3 to go. The
    option stays the most that a request reserves. `n_active` is given for models with sliding windows alone.
    """
    reserved = original(queue, n_active, extra_reserved_reqs)
    if n_active is not None or not queue.queue:  # nobody waits: the sum is not used
        return reserved
    most, page = queue.num_reserved_decode_tokens, queue.token_to_kv_pool_allocator.page_size
    taken = itertools.chain(
        queue.scheduler.running_batch.reqs,
        (waiting.req for waiting in queue.transfer_queue.queue),
        queue.scheduler.waiting_queue,
    )
    return most * extra_reserved_reqs + sum(
        _room_to_come(request, most, page)
        for request in taken
        if request.finished_reason is None  # not those that have failed, whose pages are held
    )


def _room_to_come(request, most: int, page: int) -> int:
    """Tokens of the pages that a request may still take, for at most `most` tokens."""
    left = min(most, max(0, request.sampling_params.max_new_tokens - len(request.output_ids)))
    if page == 1 or not left:
        return left
    length = len(request.origin_input_ids) + len(request.output_ids)
    has = length - 1  # the newest token may have no place yet
    return page * (-(-(length + left) // page) - -(-has // page))
