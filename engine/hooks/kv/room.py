"""Bodies of the hooks into KV room: what a decode engine reserves, and how long a request may be."""

from __future__ import annotations

import itertools

from engine.hooks.settings import ResolvedSettings


def reserve_what_can_come(original, queue, n_active=None, extra_reserved_reqs=0):
    """Tokens of KV to keep free for the requests that the engine has taken.

    SGLang keeps `--num-reserved-decode-tokens` (512) for each, also for one that may generate 64 or has 3 to go. The
    option stays the most that a request reserves. `n_active` is given for models with sliding windows alone.
    """
    reserved = original(queue, n_active, extra_reserved_reqs)
    if n_active is not None or not (queue.queue or queue.retracted_queue):  # nobody waits: the sum is not used
        return reserved
    most, page = queue.num_reserved_decode_tokens, queue.token_to_kv_pool_allocator.page_size
    taken = itertools.chain(
        queue.scheduler.running_batch.reqs,
        (waiting.req for waiting in queue.transfer_queue.queue),
        queue.scheduler.waiting_queue,
    )
    return most * extra_reserved_reqs + sum(_room_to_come(request, most, page) for request in taken)


def _room_to_come(request, most: int, page: int) -> int:
    """Tokens of the pages that a request may still take, for at most `most` tokens."""
    left = min(most, max(0, request.sampling_params.max_new_tokens - len(request.output_ids)))
    if page == 1 or not left:
        return left
    length = len(request.origin_input_ids) + len(request.output_ids)
    has = length - 1  # the newest token may have no place yet
    return page * (-(-(length + left) // page) - -(-has // page))


def bound_lengths(info, worker):
    """`get_worker_info`'s answer, with no more than the tokens of a request that the scheduler can take some time.

    Its fifth and sixth parts are the most tokens of a request and of its prompt. SGLang takes the cache's size for
    them. But a prefill batch takes no prompt whose pages and one more are as many as the cache has, and a decode engine
    none that leaves less than what it reserves for an answer. A longer one would wait for ever, and all behind it.
    """
    size, most, slack = info[0], info[4], info[4] - info[5]
    page = worker.model_runner.token_to_kv_pool_allocator.page_size
    if page > 1:
        most = min(most, size - 2 * page)
    settings = ResolvedSettings()
    if settings.disaggregation_mode == "decode":
        most = min(most, size - settings.num_reserved_decode_tokens)
    if most < slack + page:
        raise RuntimeError(
            f"a KV cache of {size} tokens, in pages of {page}, has no room for a prompt: give more max_total_tokens"
        )
    return (*info[:4], most, most - slack, *info[6:])
