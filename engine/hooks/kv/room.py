"""Bodies of the hooks into a decode engine's room for KV: what it reserves, who gets pages when, from whom KV comes."""

import itertools
import logging

from engine.hooks.settings import ResolvedSettings

log = logging.getLogger(__name__)


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
    if settings.disaggregation_mode == "decode" or settings.enable_pd_role_switch:
        most = min(most, size - settings.num_reserved_decode_tokens)
    if most < slack + page:
        raise RuntimeError(
            f"a KV cache of {size} tokens, in pages of {page}, has no room for a prompt: give more max_total_tokens"
        )
    return (*info[:4], most, most - slack, *info[6:])


def wait_for_the_running_step(original, allocator, *, delta_len: int, **details):
    """Give a prompt pages for its KV, on a GPU, after the steps that have been launched.

    The scheduler launches step k+1 before it processes the result of step k. Where that ends a request, its pages are
    free while step k+1 still writes its next token to one of them. Later steps of this engine come after that write.
    KV of a new request, which a prefill engine writes, does not: so one of its tokens could be overwritten. Freed pages
    lie apart until the others are used up, so this wait is rare.
    """
    most_pages = delta_len // allocator.page_size + 2  # from as many on, SGLang takes what lies apart
    if most_pages > len(allocator.free_pages):
        import torch

        torch.cuda.synchronize(allocator.device)
    return original(allocator, delta_len=delta_len, **details)


def decline_unlike(original, manager, bootstrap_addr):
    """Whether KV can come from the prefill engine at that address; SGLang raises where its pages or dtype differ.

    Nothing catches that in the scheduler, so the engine would end with all that it serves. Declined, the request fails.
    """
    try:
        return original(manager, bootstrap_addr)
    except RuntimeError as error:
        log.error("no KV from the prefill engine at %s: %s", bootstrap_addr, error)
        return False
