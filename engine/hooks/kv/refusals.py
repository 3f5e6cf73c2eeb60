"""Body of the hooks that keep requests which an engine refuses from its KV transfers."""

from __future__ import annotations


def end_refused(original, queue, request):
    """Whether a request may not enter the queue of KV transfers; one that the engine has refused ends at once.

    SGLang gives such a request (its prompt is too long, say) a prompt of one token and lets it pass to learn of its
    end. A prefill engine then sends the KV of that token and calls the request done, and the decode engine, which
    knows nothing of it, answers from pages of which the others hold what somebody has left there.
    """
    from sglang.srt.disaggregation.utils import prepare_abort
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    reason = request.to_finish
    if not isinstance(reason, FINISH_ABORT) or request.output_ids:  # one with tokens was retracted
        return original(queue, request)
    request.to_finish = None
    prepare_abort(request, reason.message, status_code=reason.status_code)
    queue.scheduler.output_streamer.stream_output([request], request.return_logprob)
    return True
