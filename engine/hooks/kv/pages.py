"""Body of the hook by which pages that a decode engine has just freed are given to no prompt while a step runs."""

from __future__ import annotations


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
