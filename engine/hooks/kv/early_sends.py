"""Bodies of the hooks into when a prefill engine sends KV: while the next batch is computed, and never too early.

SGLang's prefill loop launches batch k+1, and then processes the results of batch k: it looks up where their KV is and
sends it. The launch also makes the scheduler's stream wait for batch k+1 (SGLang's pull request 31687), and the lookup
is a copy to the host on that stream. So KV of batch k would leave only once batch k+1 is computed, and the GPU would
idle while it leaves and batch k+2 is prepared.

Two hooks move the wait past the results, before anything else. docs/decisions/0027 says why answers stay right, and
why two kinds of engines keep SGLang's order: in models with a pool for sliding windows, results write to what the
running batch reads; with a hierarchical cache, they can name pages that are still being loaded for that batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_put_off: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()  # by scheduler


def put_off(original, scheduler) -> None:
    """Let the scheduler's stream wait later, if results of an earlier batch are to be processed first."""
    if scheduler.last_batch and not scheduler.is_hybrid_swa and not scheduler.enable_hierarchical_cache:
        _put_off[scheduler] = original
    else:
        original(scheduler)


def wait_now(result, scheduler, *args, **kwargs):
    """After the results: the wait that was put off."""
    if (wait := _put_off.pop(scheduler, None)) is not None:
        wait(scheduler)
    return result


def send_only_loaded_kv(original, scheduler, req) -> None:
    """Before a prompt is computed: send what the prefix cache has of it, unless that may still be on its way there.

    With a hierarchical cache, a prompt finds KV that is being loaded from host memory for another prompt of its batch.
    Over NIXL SGLang would send it as it is. It leaves with the rest of the prompt instead.
    """
    if not scheduler.enable_hierarchical_cache:
        original(scheduler, req)
