"""An objective is its loss with its own parameters, and reads the reference without the adapter and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from training.errors import OptionInvalid
from training.loop.objectives import Dpo, Objective, Sft
from training.losses import Loss, dpo, sft
from training.scores import TargetScores
from training.tree.documents import Branch, Document
from training.tree.rows import Row

ROW = Row.of([Document((1, 2), (Branch(2, (3, 4), 0), Branch(2, (5,), 0, is_chosen=False)))])
NO_MATTER = torch.zeros(3, dtype=torch.bool)
ADAPTED = TargetScores(torch.tensor([-1.0, -0.5, -2.0]), NO_MATTER)
BASE = TargetScores(torch.tensor([-1.5, -0.25, -1.0]), NO_MATTER)


class Model:
    """Scores of an adapted row, and of one without an adapter, for which there are no gradients."""

    def score(self, row: Row) -> TargetScores:
        assert torch.is_grad_enabled() == bool(row.applied)
        return ADAPTED if row.applied else BASE


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (Sft(), sft(ADAPTED, ROW)),
        (Dpo(), dpo(ADAPTED, BASE, ROW, beta=0.1)),
        (Dpo(beta=0.7), dpo(ADAPTED, BASE, ROW, beta=0.7)),
        (Dpo(label_smoothing=0.3), dpo(ADAPTED, BASE, ROW, beta=0.1, label_smoothing=0.3)),
    ],
    ids=str,
)
def test_a_loss_has_the_objectives_parameters(objective: Objective, expected: Loss):
    found = objective(Model(), ROW)
    assert (float(found.total), found.weight) == (float(expected.total), expected.weight)


@pytest.mark.parametrize(
    ("objective", "options", "message"),
    [
        (Dpo, {"beta": 0.0}, "beta is 0.0; it must be positive"),
        (Dpo, {"label_smoothing": 0.5}, "the label smoothing is 0.5; it is from 0 to below 0.5"),
    ],
)
def test_parameters_that_cannot_be(objective: type, options: dict[str, Any], message: str):
    with pytest.raises(OptionInvalid, match=message):
        objective(**options)
