"""Bodies of hooks into one token of an answer: its penalty, the end tokens with the id 0, and its hidden state.

SGLang takes an end token with the id 0 for none. The hidden state of a prompt's last token is its embedding: SGLang
computes it in every role, and a prefill engine, where a batch ends, leaves it out of the answer.
"""

from __future__ import annotations

import inspect
from typing import Any

_ANY_OTHER = 1  # SGLang reads no more of it than that it is a token


def trim_token_0(original: Any, manager: Any, output: Any, finished_reason: Any, no_stop_trim: bool) -> Any:
    """Keep the token that ended an answer out of its text."""
    if finished_reason and finished_reason.get("matched") == 0:
        finished_reason = {**finished_reason, "matched": _ANY_OTHER}
    return original(manager, output, finished_reason, no_stop_trim)


def end_at_token_0(original: Any, model: Any) -> Any:
    """The end tokens of a model: those of its configuration, and of its defaults for generation."""
    found = original(model)
    is_0 = getattr(model.hf_generation_config, "eos_token_id", None) == 0
    return {*found, 0} if is_0 else found


def run_uncompiled(compiled: Any, *tensors: Any) -> Any:
    """Run the function that `torch.compile` wraps.

    Compiled, it takes 10 to 50 s at its first use, and seconds again when the shape of the batch changes. Without, it
    makes three elementwise passes over the logits instead of one.
    """
    return inspect.unwrap(compiled)(*tensors)


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
