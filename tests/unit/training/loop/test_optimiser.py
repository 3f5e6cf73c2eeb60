"""What an optimiser refuses. Its steps are in `executor/test_steps.py`."""

import pytest
import torch

from training.errors import CheckpointDamaged, OptionInvalid
from training.loop.optimiser import AdamOptions, Optimiser


def parameters() -> torch.nn.ParameterDict:
    generator = torch.Generator().manual_seed(0)
    return torch.nn.ParameterDict({name: torch.randn(4, 3, generator=generator) for name in ("a", "b")})


def test_a_state_of_other_parameters_is_refused():
    saved = Optimiser(parameters()).tensors()
    with pytest.raises(CheckpointDamaged, match=r"parameter c is torch.float32 \[4, 3\]; the checkpoint has none"):
        Optimiser(torch.nn.ParameterDict({"c": torch.zeros(4, 3)})).load(saved)
    with pytest.raises(CheckpointDamaged, match=r"a is torch.float32 \[2\]; .* torch.float32 \[4, 3\]"):
        Optimiser(torch.nn.ParameterDict({"a": torch.zeros(2)})).load(saved)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["weight_decay", "max_grad_norm"])
def test_options_that_cannot_be(name: str, value: float):
    with pytest.raises(OptionInvalid, match=f"is {value:g}; it must be 0 or a positive"):
        AdamOptions(**{name: value})
