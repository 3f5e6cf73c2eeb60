"""Body of the hook that lets a prefill engine answer with the last hidden states of its prompts, for embeddings.

SGLang computes them where a batch has a request that asks for them, in every role. A unified engine puts them into its
answers; the function of a prefill engine that ends a batch leaves them out.
"""

from __future__ import annotations


def keep_last_hidden_states(original, scheduler, batch, result):
    """Give each request that asks for it the hidden state of its prompt's last token, as a unified engine does."""
    wanted = [
        (row, req)
        for row, req in enumerate(batch.reqs)
        if req.return_hidden_states and req.inflight_middle_chunks <= 0  # else its last token is in a later batch
    ]
    if wanted:
        if result.copy_done is not None:
            result.copy_done.synchronize()
        states = result.logits_output.hidden_states  # [num_requests, hidden_size] in the mode `last`
        for row, req in wanted:
            req.hidden_states[:] = [states[row].tolist()]
    return original(scheduler, batch, result)
