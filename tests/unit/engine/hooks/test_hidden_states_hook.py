"""Which hidden state each request of a prefill batch is given, and when."""

from types import SimpleNamespace

import torch

from engine.hooks.requests.tokens import keep_last_hidden_states


def request(wants, num_chunks_to_come=0):
    return SimpleNamespace(return_hidden_states=wants, inflight_middle_chunks=num_chunks_to_come, hidden_states=[])


def test_each_request_gets_its_own_row_once_its_prompt_is_read():
    plain, first, second, cut = request(False), request("last"), request("last"), request("last", 1)
    first.hidden_states.append([9.0])  # of an earlier attempt, which SGLang put back into the queue
    synchronized, states = [], torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    result = SimpleNamespace(
        copy_done=SimpleNamespace(synchronize=lambda: synchronized.append(True)),
        logits_output=SimpleNamespace(hidden_states=states),
    )

    def original(scheduler, batch, _result):
        return scheduler, [list(req.hidden_states) for req in batch.reqs]  # it may stream them

    seen = keep_last_hidden_states(original, "s", SimpleNamespace(reqs=[plain, first, second, cut]), result)
    assert seen == ("s", [[], [[2.0]], [[3.0]], []])
    assert synchronized
