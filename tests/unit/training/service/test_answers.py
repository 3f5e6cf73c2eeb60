"""Where answers begin: what says it, in which order, and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.training.trainer import datum, put

from adapters.model.normal_form import Positions
from training.executor.operations import Pass, Step
from training.service import tinker_pb2 as pb
from training.service.data import passes as service_data
from training.service.data.answers import EarlierPasses
from training.service.data.passes import DataLimits, pass_of
from training.service.data.rollouts import Find, Rollouts
from training.service.errors import Refused

TOKENS = [5, 6, 7, 8, 9, 10]  # five targets
LIMITS = DataLimits(vocabulary=64, max_tokens=16)
POLICY = {"logprobs": [0.0] * 5, "advantages": [0.0, 0.0, 0.5, 0.0, -1.0]}


def read(
    *data: pb.Datum,
    loss_fn: str = "cross_entropy",
    positions: Positions = "prefill",
    earlier: EarlierPasses | None = None,
    sampled: Find = lambda _sequence: (),
    **fields: Any,
) -> Pass:
    request = pb.ForwardBackwardRequest(model_id="m", seq_id=1, data=data, loss_fn=loss_fn, **fields)
    return pass_of(request, positions, LIMITS, earlier or EarlierPasses(), sampled)


def answers(*data: pb.Datum, **fields: Any) -> tuple[tuple[int, int], ...]:
    return read(*data, **fields).data[0].answers


def with_spans(made: pb.Datum, *spans: tuple[str, int, int]) -> pb.Datum:
    """(sequence, offset, length); an empty name: a prompt."""
    for name, offset, length in spans:
        span = made.loss_fn_input_spans.add()
        one = span.sampled_tokens if name else span.prompt_tokens
        one.sequence_id, one.offset, one.length = name or "p", offset, length
    return made


def test_weights_of_0_and_1_mark_answers():
    assert answers(datum(TOKENS, weights=[0, 0, 1, 1, 1])) == ((2, 5),)
    assert answers(datum(TOKENS, weights=[0, 1, 0, 1, 1])) == ((1, 2), (3, 5))


def test_weights_of_a_mean_mark_answers_too():
    """The cookbook divides them by their number."""
    assert answers(datum(TOKENS, weights=[0, 1 / 3, 0, 1 / 3, 1 / 3])) == ((1, 2), (3, 5))
    earlier = EarlierPasses()
    earlier.note(1, read(datum(TOKENS, weights=[0, 1, 1, 1, 1]), forward_only=True))
    assert answers(datum(TOKENS, weights=[0, 0, 0.5, 0.5, 0]), earlier=earlier) == ((1, 5),)  # a loss's gradient


def test_what_was_cut_off_before_its_answer_teaches_nothing():
    cut = datum(TOKENS, weights=[0] * 5)
    assert answers(cut) == ()
    with pytest.raises(Refused, match="nothing says"):  # nor has it log-probabilities
        read(cut, forward_only=True)


def test_samples_are_known():
    """Without spans, and with targets that are no tokens in the prompt, as the cookbook's rl_loop sends."""
    rollouts = Rollouts(Path(":memory:"))
    rollouts.add("acme", [5, 6, 7], [[8, 9, 10], [8, 9], [8]])
    rollouts.add("acme", [5], [[6]])  # equals a token of the prompt
    policy = {"logprobs": [0, 0, -0.5, -0.1, 0.0], "advantages": [0, 0, 1, 1, 1]}
    made = datum(TOKENS, **policy)
    put(made, "target_tokens", [0, 0, 8, 9, 10], np.int64)
    sampled = partial(rollouts.find, "acme")
    assert answers(made, loss_fn="ppo", sampled=sampled) == ((2, 5),)
    assert answers(datum(TOKENS), sampled=sampled, forward_only=True) == ((0, 1), (2, 5))
    assert answers(datum(TOKENS, weights=[0, 0, 0, 0, 1]), sampled=sampled) == ((4, 5),)  # these say it
    with pytest.raises(Refused, match="nothing says"):
        read(made, loss_fn="ppo", sampled=partial(rollouts.find, "other"))
    outside = {**policy, "advantages": [0, 1, 1, 1, 1]}
    with pytest.raises(Refused, match=r"advantages is 1\.0 at target 1, outside of answers"):
        read(datum(TOKENS, **outside), loss_fn="ppo", sampled=sampled)


def test_the_tensor_answer_comes_first():
    marked = datum(TOKENS, weights=[0, 0, 0, 0.5, 1], answer=[0, 0, 1, 1, 1])
    assert answers(with_spans(marked, ("s", 0, 5))) == ((2, 5),)


def test_spans_mark_what_was_sampled():
    weighted = datum(TOKENS, weights=[0, 0, 0.1, 0.2, -3])
    assert answers(with_spans(weighted, ("", 0, 2), ("s", 0, 1), ("s", 1, 2))) == ((2, 5),)


def test_of_two_sequences_the_first_is_context_of_the_second():
    weighted = datum(TOKENS, weights=[0, 1, 1, 1, 1])
    assert answers(with_spans(weighted, ("", 0, 1), ("s", 0, 2), ("t", 0, 2))) == ((1, 3), (3, 5))
    weighted = datum(TOKENS, weights=[0, 1, 1, 1, 1])
    assert answers(with_spans(weighted, ("", 0, 1), ("s", 0, 2), ("s", 0, 2))) == ((1, 3), (3, 5))


def test_a_backward_pass_has_the_answers_of_its_forward_pass():
    earlier = EarlierPasses()
    gradients = datum(TOKENS, weights=[0, 0, 0.25, -1.5, 0])
    with pytest.raises(Refused, match="nothing says where its answer begins"):
        read(gradients, earlier=earlier)
    forward = read(datum(TOKENS, weights=[0, 1, 1, 1, 1]), forward_only=True)
    earlier.note(1, forward)
    assert answers(gradients, earlier=earlier) == ((1, 5),)
    with pytest.raises(Refused, match="mark another answer than the forward pass"):
        read(datum(TOKENS, weights=[0, 0, 0, 0, 1]), earlier=earlier)
    assert answers(datum(TOKENS, weights=[0, 0, 0, 0, 1]), earlier=earlier, forward_only=True) == ((4, 5),)
    with pytest.raises(Refused, match="nothing says"):
        read(datum([*TOKENS[:-1], 11], weights=[0, 0, 0.25, -1.5, 0]), earlier=earlier)
    step = Step(0.1, 0.9, 0.95, 1e-12, 0, 0)
    earlier.note(0, step)  # one that arrives late
    assert answers(gradients, earlier=earlier) == ((1, 5),)
    earlier.note(2, step)
    with pytest.raises(Refused, match="nothing says"):
        read(gradients, earlier=earlier)


def test_a_policy_loss_needs_more_than_zeros():
    for loss in ("importance_sampling", "ppo", "cispo"):
        with pytest.raises(Refused, match="nothing says"):
            read(datum(TOKENS, **POLICY), loss_fn=loss)
        marked = datum(TOKENS, answer=[0, 0, 1, 1, 1], **POLICY)
        assert answers(marked, loss_fn=loss) == ((2, 5),)


def test_of_adapters_for_all_positions_everything_counts():
    assert answers(datum(TOKENS, weights=[0.5, 0, 2, 0, 0]), positions="all") == ((0, 5),)


def test_weights_are_those_of_the_answer():
    assert read(datum(TOKENS, answer=[0, 0, 1, 1, 1])).data[0].input("weights").tolist() == [1.0] * 5
    with pytest.raises(Refused, match=r"weights is 1\.0 at target 0, outside of answers"):
        read(datum(TOKENS, weights=[1, 0, 1, 1, 1], answer=[0, 0, 1, 1, 1]))
    with pytest.raises(Refused, match=r"advantages is 0\.5 at target 2"):
        read(datum(TOKENS, answer=[0, 0, 0, 1, 1], **POLICY), loss_fn="ppo")


def other_targets() -> pb.Datum:
    made = datum(TOKENS, weights=[0, 0, 1, 1, 1])
    put(made, "target_tokens", [6, 7, 8, 12, 10], np.int64)
    return made


def float_targets() -> pb.Datum:
    made = datum(TOKENS, weights=[0, 0, 1, 1, 1])
    put(made, "target_tokens", [6, 7, 8, 9, float("nan")])
    return made


def of_many(part: str) -> pb.Datum:
    made = datum(TOKENS, weights=[0, 0, 1, 1, 1])
    for number in range(17):
        if part == "loss_fn_inputs":
            put(made, f"more-{number}", [1.0] * 5)
        else:
            getattr(made, part).add()
    return made


def of_shape(shape: list[int]) -> pb.Datum:
    made = datum(TOKENS, weights=[0, 0, 1, 1, 1])
    made.loss_fn_inputs["weights"].shape[:] = shape
    return made


def with_image() -> pb.Datum:
    made = datum(TOKENS, weights=[0, 0, 1, 1, 1])
    made.model_input.add().image.SetInParent()
    return made


def sparse() -> pb.Datum:
    made = datum(TOKENS, weights=[0, 0, 1, 1, 1])
    made.loss_fn_inputs["weights"].sparse_csr.SetInParent()
    return made


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (datum(TOKENS, weights=[0, 0, 0.5, 1, 1]), "nothing says"),
        (datum(TOKENS, weights=[0, 0, -1, -1, -1]), "nothing says"),
        (datum(TOKENS, weights=[0, 0, 1, 1, 1], answer=[0] * 5), "nothing says"),
        (datum(TOKENS, weights=[0, 0, 1, 1, 1], answer=[0, 0, 2, 1, 1]), "answer has a value that is neither"),
        (datum(TOKENS, weights=[0, 0, 1, 1, 1], mask=[0, 0, 1, 1, 1]), "loss_fn_inputs has 'mask'"),
        (datum(TOKENS, answer=[0, 0, 1, 1, 1], weights=[0, 0, 1, 1, float("nan")]), "not finite"),
        (datum(TOKENS, weights=[0, 1, 1, 1]), r"'weights' has the shape \[4\]"),
        (datum([*TOKENS[:-1], 64], weights=[0, 0, 1, 1, 1]), "outside of the vocabulary, 0 to 63"),
        (datum([-1, *TOKENS[1:]], weights=[0, 0, 1, 1, 1]), "outside of the vocabulary"),
        (datum(list(range(17)), weights=[0] * 8 + [1] * 8), "16 tokens and a last target"),
        (datum([5], weights=[]), "0 tokens and a last target"),
        (with_spans(datum(TOKENS, weights=[0, 0, 1, 1, 1]), ("s", 0, 4)), "cover 4 of its 5 targets"),
        (with_spans(datum(TOKENS, weights=[0, 0, 1, 1, 1]), ("s", 0, 6)), "cover other than its 5"),
        (with_spans(datum(TOKENS, weights=[0, 0, 1, 1, 1]), ("s", 0, -1)), "cover other than its 5"),
        (other_targets(), "target 3 of an answer is 12, but the next token is 9"),
        (float_targets(), "target_tokens is float32; token ids are int64"),
        (of_many("loss_fn_inputs"), "19 loss_fn_inputs"),
        (of_many("loss_fn_input_spans"), "more chunks or spans than"),
        (of_many("model_input_spans"), "more chunks or spans than"),
        (of_many("model_input"), "more chunks or spans than"),
        (of_shape([1, 5]), r"'weights' has the shape \[1, 5\]"),
        (with_image(), "a chunk of image"),
        (sparse(), "'weights' is sparse"),
        (pb.Datum(), "no target_tokens"),
    ],
)
def test_what_is_refused(made: pb.Datum, why: str):
    with pytest.raises(Refused, match=f"datum 0: .*{why}"):
        read(made)


def test_losses_and_their_configuration_are_refused_by_name():
    good = datum(TOKENS, answer=[0, 0, 1, 1, 1], **POLICY)
    with pytest.raises(Refused, match="loss_fn is 'dro'"):
        read(good, loss_fn="dro")
    with pytest.raises(Refused, match="data has 0 datums; a pass has 1 to 1024"):
        read()
    for config in ({"beta": 0.1}, {"clip_low_threshold": float("inf")}):
        with pytest.raises(Refused, match="loss_fn_config has"):
            read(good, loss_fn="ppo", loss_fn_config=config)
    text = {"clip_low_threshold": pb.LossConfigValue(text="low")}
    with pytest.raises(Refused, match="it must be a number"):
        read(good, loss_fn="ppo", loss_fn_config_v2=text)
    number = {"clip_low_threshold": pb.LossConfigValue(number=0.5)}
    assert read(good, loss_fn="ppo", loss_fn_config_v2=number).config == {"clip_low_threshold": 0.5}


def test_very_many_answers_are_bounded(monkeypatch: pytest.MonkeyPatch):
    alternating = datum(TOKENS, weights=[1, 0, 1, 0, 1])  # contexts of 1, 3 and 5 tokens
    monkeypatch.setattr(service_data, "_MAX_CONTEXT_TOKENS", 18)
    assert len(read(alternating, alternating).data) == 2
    with pytest.raises(Refused, match="the contexts of all answers have 27 tokens, over 18"):
        read(alternating, alternating, alternating)
    with pytest.raises(Refused, match="data has 1025 datums"):
        read(*[pb.Datum()] * 1025)
