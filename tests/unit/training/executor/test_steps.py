"""A step is torch's AdamW with the options of that step, and what fails changes nothing."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from training.errors import LossNotFinite, OptionInvalid
from training.executor.learner import Learner
from training.executor.operations import Spec, Step, decode_operation

STEPS = (
    Step(0.1, 0.9, 0.95, 1e-12, 0.0, 0.0),
    Step(0.02, 0.8, 0.99, 1e-3, 0.1, 0.0),
    Step(0.05, 0.9, 0.95, 1e-12, 0.0, 0.25),  # its gradient is clipped
)


def test_a_policy_is_whole_in_a_checkpoint_and_on_its_device(tiny: Any, tmp_path: Path):
    """Also what no step changes: the signs of a rotation, which another seed draws otherwise."""
    _, base = tiny("llama")
    saved, other = (Learner(Spec(4, seed, kind="loreft"), base, "cpu") for seed in (2, 3))
    signs = [dict(each.adapter.named_buffers()) for each in (saved, other)]
    assert any(not torch.equal(signs[0][name], signs[1][name]) for name in signs[0])
    with_gradients(saved, gradients(saved, 1))
    saved.step(STEPS[0])
    saved.save(tmp_path / "one", 7, "demo")
    assert other.load(tmp_path / "one", whole=True) == 7
    for (_, one), (_, two) in zip(saved.adapter.reft(), other.adapter.reft(), strict=True):
        assert all(map(torch.equal, one.served(torch.float32), two.served(torch.float32)))  # type: ignore[arg-type]
    elsewhere = Learner(Spec(4, seed=3, kind="loreft"), base, "meta")
    elsewhere.load(tmp_path / "one", whole=True)
    found = {name: each for name, each in elsewhere._optimiser.tensors().items() if not name.startswith("step/")}
    assert {each.device.type for each in found.values()} == {"meta"}
    parameters_and_moments = [each for name, each in found.items() if not name.startswith("buffer/")]
    assert sum(each.nbytes for each in parameters_and_moments) == saved.num_bytes == other.num_bytes


def test_a_log_of_before_has_lora_only():
    earlier = msgspec.msgpack.encode({"type": "create", "rank": 4, "seed": 2, "modules": None, "positions": "all"})
    assert decode_operation(earlier) == Spec(4, seed=2, positions="all", kind="lora")


@pytest.fixture
def learner(tiny: Any) -> Learner:
    _, base = tiny("llama")
    return Learner(Spec(4, seed=2), base, "cpu")


def gradients(learner: Learner, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(each.shape, generator=generator) for each in learner.adapter.parameters()]


def with_gradients(learner: Learner, found: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(learner.adapter.parameters(), found, strict=True):
        parameter.grad = gradient.clone()


def test_a_step_is_adamw_with_its_own_options(learner: Learner):
    plain = [each.detach().double() for each in learner.adapter.parameters()]
    first, second = [torch.zeros_like(each) for each in plain], [torch.zeros_like(each) for each in plain]
    for number, step in enumerate(STEPS, 1):
        found = gradients(learner, number)
        with_gradients(learner, found)
        norm = torch.cat([each.flatten().double() for each in found]).norm().item()
        assert learner.step(step).values["grad_norm"] == pytest.approx(norm, rel=1e-5)
        scale = min(1.0, step.max_grad_norm / norm) if step.max_grad_norm else 1.0
        for index, gradient in enumerate(found):
            g = gradient.double() * scale
            first[index] = step.beta1 * first[index] + (1 - step.beta1) * g
            second[index] = step.beta2 * second[index] + (1 - step.beta2) * g * g
            mean, spread = first[index] / (1 - step.beta1**number), second[index] / (1 - step.beta2**number)
            plain[index] *= 1 - step.learning_rate * step.weight_decay
            plain[index] -= step.learning_rate * mean / (spread.sqrt() + step.epsilon)
        for parameter, expected in zip(learner.adapter.parameters(), plain, strict=True):
            torch.testing.assert_close(parameter.double(), expected, atol=1e-5, rtol=1e-4)
    assert all(parameter.grad is None for parameter in learner.adapter.parameters())


def test_what_fails_changes_neither_parameters_nor_moments(learner: Learner, tmp_path: Path):
    with_gradients(learner, gradients(learner, 1))
    learner.step(STEPS[0])
    learner.save(tmp_path / "before", 1, "demo")
    for value in (float("nan"), float("inf")):
        with_gradients(learner, gradients(learner, 2))
        next(learner.adapter.parameters()).grad[0, 0] = value  # type: ignore[index]
        with pytest.raises(LossNotFinite, match=f"gradient's norm is {value}"):
            learner.step(STEPS[1])
    with_gradients(learner, gradients(learner, 2))
    learner.lose("command 7")
    with pytest.raises(OptionInvalid, match="a pass before this step failed"):
        learner.step(STEPS[1])
    learner.save(tmp_path / "after", 1, "demo")
    files = ("adapter_model.safetensors", "training/state.safetensors")
    assert all((tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes() for name in files)
    assert learner.step(STEPS[1]).values == {"grad_norm": 0.0}  # nothing is left of them
