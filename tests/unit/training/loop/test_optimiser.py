"""AdamW, clipping, and a state that goes on bit by bit."""

import pytest
import torch

from training.errors import CheckpointDamaged, LossNotFinite, OptionInvalid
from training.loop.optimiser import AdamOptions, Optimiser


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(4, 3, generator=generator)) for name in ("a", "b")}


def with_gradients(chosen: dict[str, torch.nn.Parameter], step: int) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(step + 100)
    for each in chosen.values():
        each.grad = torch.randn(each.shape, generator=generator)
    return chosen


def test_steps_are_those_of_adamw():
    ours, theirs = parameters(), parameters()
    optimiser = Optimiser(ours, AdamOptions(weight_decay=0.1, max_grad_norm=0.5))
    reference = torch.optim.AdamW(theirs.values(), weight_decay=0.1)
    for step, learning_rate in enumerate((0.01, 0.1, 0.03)):
        reference.param_groups[0]["lr"] = learning_rate
        with_gradients(ours, step)
        norm = optimiser.step(learning_rate)
        with_gradients(theirs, step)
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)))
        reference.step()
    for name, each in ours.items():
        torch.testing.assert_close(each, theirs[name], rtol=0, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float):
    chosen = with_gradients(parameters(), 0)
    before = {name: each.detach().clone() for name, each in chosen.items()}
    chosen["b"].grad[0, 0] = value
    with pytest.raises(LossNotFinite, match=r"gradient's norm is (nan|inf)"):
        Optimiser(chosen, AdamOptions()).step(0.1)
    assert all(torch.equal(each, before[name]) for name, each in chosen.items())


def test_a_state_of_other_parameters_is_refused():
    saved = Optimiser(parameters(), AdamOptions()).tensors()
    with pytest.raises(CheckpointDamaged, match=r"parameter c is torch.float32 \[4, 3\]; the checkpoint has none"):
        Optimiser({"c": torch.nn.Parameter(torch.zeros(4, 3))}, AdamOptions()).load(saved)
    with pytest.raises(CheckpointDamaged, match=r"a is torch.float32 \[2\]; .* torch.float32 \[4, 3\]"):
        Optimiser({"a": torch.nn.Parameter(torch.zeros(2))}, AdamOptions()).load(saved)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["weight_decay", "max_grad_norm"])
def test_options_that_cannot_be(name: str, value: float):
    with pytest.raises(OptionInvalid, match=f"is {value:g}; it must be 0 or a positive"):
        AdamOptions(**{name: value})
