"""Bodies of the hooks by which a decode engine takes and frees KV pages of several tokens without waiting for its GPU.

A decode engine's step is often bound by the scheduler's thread, so what waits there makes each token later.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace


class _WholePages:
    """An allocator of pages, as one of tokens: it gives the first tokens of free pages."""

    page_size = 1

    def __init__(self, allocator) -> None:
        self._allocator = allocator

    def alloc(self, num_tokens: int):
        page = self._allocator.page_size
        found = self._allocator.alloc(-(-num_tokens // page) * page)
        return None if found is None else found[:num_tokens]


def take_whole_pages(original, allocator, *, total_prefix_len, uses_swa_tail, **details):
    """Give a prompt without a cached prefix its pages as slices of the free ones.

    SGLang runs a kernel for it, whose four arguments it first copies to the GPU, and waits for each copy.
    """
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    if type(allocator) is PagedTokenToKVPoolAllocator and total_prefix_len == 0 and not uses_swa_tail:
        allocator = _WholePages(allocator)
    return original(allocator, total_prefix_len=total_prefix_len, uses_swa_tail=uses_swa_tail, **details)


def free_whole_pages(original, cache, req, is_insert=True, *, kv_len_to_handle):
    """Free a finished request's pages by every first token of a page, as SGLang's prefix cache does.

    Without that cache SGLang looks for the pages with `torch.unique`, whose result's size the CPU waits for.
    """
    allocator = cache.token_to_kv_pool_allocator
    free = partial(allocator.free_segment, start_pos=req.cache_protected_len)
    view = SimpleNamespace(
        req_to_token_pool=cache.req_to_token_pool, token_to_kv_pool_allocator=SimpleNamespace(free=free)
    )
    return original(view, req, is_insert, kv_len_to_handle=kv_len_to_handle)


def wait_for_the_running_step(original, allocator):
    """Make freed pages available again, on a GPU, after the steps that have been launched.

    The scheduler launches step k+1 before it processes the result of step k. Where that ends a request, its pages are
    free while step k+1 still writes its next token to one of them. Later steps of this engine come after that write.
    KV of a new request, which a prefill engine writes, does not: so one of its tokens could be overwritten. Freed pages
    lie apart until the others are used up, so this wait is rare.
    """
    if len(allocator.release_pages):
        import torch

        torch.cuda.synchronize(allocator.device)
    return original(allocator)
