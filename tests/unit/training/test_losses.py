"""Losses against their formulas, and objectives, each its loss with its own parameters."""

import math
from typing import Any

import pytest
import torch

from training.errors import DocumentInvalid, OptionInvalid
from training.losses import Dpo, Loss, Objective, Sft, dpo, pairs, sft
from training.scores import TargetScores
from training.tree.documents import Branch, Document
from training.tree.rows import Row


def pair(example: int, chosen: int, rejected: int) -> Document:
    """A pair whose answers have so many tokens; the rejected one comes first."""
    return Document((1,), (Branch(1, (2,) * rejected, example, is_chosen=False), Branch(1, (3,) * chosen, example)))


ROW = Row.of([pair(4, 2, 1), pair(9, 1, 3)])  # answers of 1, 2, 3 and 1 tokens
LOGPROBS = [-1.0, -0.5, -0.25, -2.0, -1.0, -0.5, -3.0]
REFERENCE = [-1.5, -0.5, -0.5, -1.0, -1.0, -1.0, -2.0]


def scores(logprobs: list[float]) -> TargetScores:
    values = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    return TargetScores(values, torch.tensor([True, False, True, False, False, False, True]))


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def means(loss: Loss) -> dict[str, float]:
    return {name: pytest.approx(float(total) / loss.weight) for name, total in loss.metrics.items()}


def test_sft_counts_every_token_the_same():
    given = scores(LOGPROBS)
    loss = sft(given, ROW)
    loss.total.backward()
    assert (loss.total.item(), loss.weight) == (8.25, 7)
    assert given.logprobs.grad is not None
    assert given.logprobs.grad.tolist() == [-1] * 7
    assert means(loss) == {"mean_token_accuracy": 3 / 7}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo(smoothing: float):
    # Log-ratios to the reference: chosen 0.25, rejected 0.5; chosen -1, rejected -0.5.
    loss = dpo(scores(LOGPROBS), scores(REFERENCE), ROW, beta=2.0, label_smoothing=smoothing)
    expected = sum(
        -(1 - smoothing) * math.log(sigmoid(margin)) - smoothing * math.log(sigmoid(-margin)) for margin in (-0.5, -1.0)
    )
    assert (float(loss.total), loss.weight) == (pytest.approx(expected), 2)
    assert means(loss) == {
        "rewards/chosen": 2 * (0.25 - 1) / 2,
        "rewards/rejected": 2 * (0.5 - 0.5) / 2,
        "rewards/accuracies": 0,
        "rewards/margins": -0.75,
        "logps/chosen": (-0.75 - 3) / 2,
        "logps/rejected": (-1 - 3.5) / 2,
    }


@pytest.mark.parametrize("kept", [slice(0, 1), slice(1, 2)])
def test_half_a_pair_is_refused(kept: slice):
    whole = pair(9, 1, 3)
    row = Row.of([pair(4, 2, 1), Document(whole.trunk, whole.branches[kept])])
    with pytest.raises(DocumentInvalid, match=r"example 9 has \d chosen and \d rejected answers; a pair has one"):
        pairs(row)


class Model:
    """Scores with an adapter, and without, for which there are no gradients."""

    def score(self, _row: Row) -> TargetScores:
        return scores(LOGPROBS)

    def score_base(self, _row: Row) -> TargetScores:
        assert not torch.is_grad_enabled()
        return scores(REFERENCE)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (Sft(), sft(scores(LOGPROBS), ROW)),
        (Dpo(), dpo(scores(LOGPROBS), scores(REFERENCE), ROW, beta=0.1)),
        (
            Dpo(beta=0.7, label_smoothing=0.3),
            dpo(scores(LOGPROBS), scores(REFERENCE), ROW, beta=0.7, label_smoothing=0.3),
        ),
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
