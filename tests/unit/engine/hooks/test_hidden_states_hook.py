"""Which hidden state each request of a prefill batch is given, and when."""

from types import SimpleNamespace

import torch

from engine.hooks.requests.tokens import keep_last_hidden_states


def request(wants, num_chunks_to_come=0):
    return SimpleNamespace(return_hidden_states=wants, inflight_middle_chunks=num_chunks_to_come, hidden_states=[])


def scheduler(*, has_draft: bool):
    return SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: not has_draft))


def test_each_request_gets_its_own_row_once_its_prompt_is_read():
    plain, first, second, cut = request(False), request("last"), request("last"), request("last", 1)
    first.hidden_states.append([9.0])  # of an earlier attempt, which SGLang put back into the queue
    synchronized, states = [], torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    result = SimpleNamespace(
        copy_done=SimpleNamespace(synchronize=lambda: synchronized.append(True)),
        logits_output=SimpleNamespace(hidden_states=states),
    )

    def original(_scheduler, batch, _result):
        return [list(req.hidden_states) for req in batch.reqs]  # it may stream them

    batch = SimpleNamespace(reqs=[plain, first, second, cut])
    assert keep_last_hidden_states(original, scheduler(has_draft=False), batch, result) == [[], [[2.0]], [[3.0]], []]
    assert synchronized


def test_with_a_draft_there_are_states_of_all_tokens():
    batch = SimpleNamespace(reqs=[request("last"), request(False), request("last")], extend_lens=[2, 1, 3])
    states = torch.tensor([[float(token)] for token in range(6)])
    result = SimpleNamespace(copy_done=None, logits_output=SimpleNamespace(hidden_states=states))
    keep_last_hidden_states(lambda *_: None, scheduler(has_draft=True), batch, result)
    assert [req.hidden_states for req in batch.reqs] == [[[1.0]], [], [[5.0]]]
