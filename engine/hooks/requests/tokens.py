"""Bodies of hooks into one token of an answer: its penalty, and its hidden state.

The hidden state of a prompt's last token is its embedding: SGLang computes it in every role, and a prefill engine,
where a batch ends, leaves it out of the answer.
"""

import inspect
from typing import Any


def run_uncompiled(compiled: Any, *tensors: Any) -> Any:
    """Run the function that `torch.compile` wraps.

    Compiled, it takes 10 to 50 s at its first use, and seconds again when the shape of the batch changes. Without, it
    makes three elementwise passes over the logits instead of one.
    """
    return inspect.unwrap(compiled)(*tensors)


def with_last_hidden_states(contract_error: Any) -> Any:
    """SGLang's check of a request to /generate, whose schema lacks what its engines take: the mode `last`."""

    def checked(body: Any) -> str | None:
        if isinstance(body, dict) and body.get("return_hidden_states") == "last":
            body = {**body, "return_hidden_states": True}
        return contract_error(body)

    return checked


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
