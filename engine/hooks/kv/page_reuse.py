"""Body of the hook into the reuse of a decode engine's KV pages."""

from __future__ import annotations


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
