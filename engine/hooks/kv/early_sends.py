"""Bodies of the hooks that send a batch's KV while the next batch is computed, on GPUs.

SGLang's prefill loop launches batch k+1, and then processes the results of batch k: it looks up where their KV is and
sends it. The launch also makes the scheduler's stream wait for batch k+1 (SGLang's pull request 31687), and the lookup
is a copy to the host on that stream. So KV of batch k would leave only once batch k+1 is computed, and the GPU would
idle while it leaves and batch k+2 is prepared.

The wait is for models with a pool for sliding windows: there, processing results writes to memory that the running
batch reads. Other models need it only before the next batch is prepared. These hooks move it there: past the results,
before anything else. What the results write until then belongs to requests whose prompt is complete, which the running
batch does not have, or was copied before the launch; pages that they free are first written to by the next batch.
"""

from __future__ import annotations

import weakref

_put_off: weakref.WeakSet = weakref.WeakSet()  # schedulers whose stream is yet to wait


def put_off(original, scheduler) -> None:
    """Let the scheduler's stream wait later, if results of an earlier batch are to be processed first."""
    if scheduler.last_batch and not scheduler.is_hybrid_swa:
        _put_off.add(scheduler)
    else:
        original(scheduler)


def wait_now(result, scheduler, *args, **kwargs):
    """After the results: the wait that was put off."""
    if scheduler in _put_off:
        _put_off.discard(scheduler)
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
    return result
