"""A pass against the plain computation, one datum at a time in float64: losses, log-probabilities, gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.training.trainer import sequence
from support.training.training_models import plain_logprobs, scramble

from adapters.model.normal_form import Positions
from training.adapted_model import AdaptedModel
from training.errors import LossNotFinite
from training.executor.losses import LOSSES
from training.executor.operations import Datum, Pass, decode_operation, encode
from training.executor.passes import compute
from training.trainable.adapter import TrainableAdapter
from training.trainable.spec import KINDS, AdapterSpec, Kind

TOLERANCE = 1e-10
LENGTH = 12
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


def make_datum(tokens: Sequence[int], answers: Sequence[tuple[int, int]], **inputs: np.ndarray) -> Datum:
    as_bytes = {name: values.astype(np.float32).tobytes() for name, values in inputs.items()}
    ids = np.array(tokens, np.int32)
    return Datum(ids[:-1].tobytes(), ids[1:].tobytes(), tuple(answers), as_bytes)


def random_data(seed: int = 3) -> tuple[Datum, ...]:
    """Two answers of one context, a conversation whose first answer is context of the second, and a short one."""
    chosen = np.random.default_rng(seed)
    shared, turns = sequence(1, LENGTH), sequence(2, LENGTH)
    sequences = [(shared, [(5, 11)]), ([*shared[:6], *sequence(4, 6)], [(5, 11)]), (turns, [(2, 4), (6, 9)])]
    sequences.append((sequence(3, 6), [(0, 5)]))
    data = []
    for tokens, answers in sequences:
        size = len(tokens) - 1
        inputs = {
            "weights": chosen.normal(size=size),
            "advantages": chosen.normal(size=size),
            "logprobs": -3 - chosen.random(size),
        }
        data.append(make_datum(tokens, answers, **inputs))
    return tuple(data)


def plain_loss(loss: str, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """As Tinker's documentation has the formulas, token by token."""
    total = logprobs.new_zeros(())
    for index in range(len(logprobs)):
        logprob, advantage = logprobs[index], inputs["advantages"][index]
        ratio = (logprob - inputs["logprobs"][index]).exp()
        clipped = ratio if 0.9 <= ratio <= 1.1 else ratio.new_tensor(0.9 if ratio < 0.9 else 1.1)
        total = (
            total
            - {
                "cross_entropy": inputs["weights"][index] * logprob,
                "importance_sampling": ratio * advantage,
                "ppo": min(ratio * advantage, clipped * advantage),
                "cispo": clipped.detach() * logprob * advantage,
            }[loss]
        )
    return total


@pytest.fixture
def setting(tiny: Any) -> Any:
    model, base = tiny("llama")

    def make(positions: Positions = "prefill", kind: Kind = "lora") -> tuple[Any, TrainableAdapter]:
        spec = AdapterSpec(kind, rank=4, positions=positions)
        return model, scramble(TrainableAdapter.create(spec, base, dtype=torch.float64))

    return make


def plain(
    model: Any, adapter: TrainableAdapter, loss: str, data: Sequence[Datum]
) -> tuple[torch.Tensor, list[np.ndarray]]:
    """The loss and the log-probabilities of each datum, computed one by one."""
    expected = torch.zeros((), dtype=torch.float64)
    logprobs = []
    for datum in data:
        scored = np.zeros(len(datum.target_ids))
        for first, end in datum.answers:
            context, answer = datum.token_ids[: first + 1], datum.target_ids[first:end]
            scores = plain_logprobs(model, adapter, context, answer, adapter.positions == "all")
            inputs = {name: torch.tensor(datum.input(name)[first:end]).double() for name in datum.inputs}
            expected = expected + plain_loss(loss, scores, inputs)
            scored[first:end] = scores.detach().numpy()
        logprobs.append(scored)
    return expected, logprobs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", ["prefill", "all"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_exact(setting: Any, loss: str, positions: Positions, kind: Kind):
    model, adapter = setting(positions, kind)
    data = random_data()
    if positions == "all":
        data = tuple(Datum(each.tokens, each.targets, ((0, len(each.target_ids)),), each.inputs) for each in data)
    expected, logprobs = plain(model, adapter, loss, data)
    wanted = torch.autograd.grad(expected, list(adapter.parameters()))
    config = CLIP if LOSSES[loss].defaults else {}
    with AdaptedModel(model, adapter) as adapted:
        found = compute(adapted, Pass(loss, config, data), 128)
    assert found.loss_sum == pytest.approx(expected.item(), abs=TOLERANCE)
    for raw, scored in zip(found.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(np.frombuffer(raw, np.float32), scored, atol=2e-6)  # float32 on the wire
    for parameter, gradient in zip(adapter.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=TOLERANCE, rtol=TOLERANCE)


def test_thresholds_are_tinkers_unless_they_are_given(setting: Any):
    model, adapter = setting()
    with AdaptedModel(model, adapter) as adapted:
        sums = [
            compute(adapted, Pass("ppo", config, random_data(), True), 128).loss_sum
            for config in ({}, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, {"clip_high_threshold": 1.01})
        ]
    assert sums[0] == sums[1] != sums[2]


def test_a_forward_pass_leaves_no_gradient_and_the_same_numbers(setting: Any):
    model, adapter = setting()
    with AdaptedModel(model, adapter) as adapted:
        task = Pass("cross_entropy", {}, random_data())
        forward = compute(adapted, Pass("cross_entropy", {}, random_data(), forward_only=True), 128)
        assert all(parameter.grad is None for parameter in adapter.parameters())
        assert compute(adapted, decode_operation(encode(task)), 128) == forward  # type: ignore[arg-type]
        assert all(parameter.grad is not None for parameter in adapter.parameters())


def test_passes_add_up_to_their_sum(setting: Any):
    """Sums, never means: two passes have the gradient of one with the data of both."""
    model, adapter = setting()
    data, gradients = random_data(), []
    with AdaptedModel(model, adapter) as adapted:
        for parts in ([data], [data[:1], data[1:]]):
            adapter.zero_grad()
            sums = [compute(adapted, Pass("cross_entropy", {}, part), 128).loss_sum for part in parts]
            gradients.append([parameter.grad.clone() for parameter in adapter.parameters()])
            assert sum(sums) == pytest.approx(compute(adapted, Pass("cross_entropy", {}, data, True), 128).loss_sum)
    torch.testing.assert_close(gradients[0], gradients[1], atol=TOLERANCE, rtol=TOLERANCE)


def test_a_loss_that_is_not_finite_is_an_error(setting: Any):
    model, adapter = setting()
    bad = random_data()[0]
    bad.inputs["logprobs"] = np.full(LENGTH - 1, -1e30, np.float32).tobytes()
    with AdaptedModel(model, adapter) as adapted, pytest.raises(LossNotFinite, match="the loss is"):
        compute(adapted, Pass("importance_sampling", {}, (bad,)), 128)
