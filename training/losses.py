"""Objectives and their losses of a row: SFT and DPO.

Each is a sum, with the weight to divide it by, so that rows and accumulated steps are averaged over all their tokens or
pairs. Names of metrics are trl's; they are sums, too.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

from training.errors import DocumentInvalid, OptionInvalid
from training.scores import TargetScores
from training.tree.rows import Row


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """A loss of some rows, summed over what it counts."""

    total: torch.Tensor  # scalar
    weight: int  # number of tokens (SFT) or pairs (DPO)
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # scalars without gradients; divide by `weight`


def sft(scores: TargetScores, row: Row) -> Loss:
    """The negative log-likelihood of the answers' tokens, each of which counts the same."""
    metrics = {"mean_token_accuracy": scores.correct.sum()}
    return Loss(-scores.logprobs.sum(), row.num_targets, metrics)


def dpo(
    scores: TargetScores, reference: TargetScores, row: Row, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Loss:
    """Direct preference optimisation (Rafailov et al. 2023): -log sigmoid(beta * (margin - reference's margin)).

    `reference` are the base model's scores: it is the reference, and needs no second copy.
    """
    chosen, rejected = pairs(row)
    logps = scores.of_answers(row)  # [answers], and so are the rewards; margins and losses are [pairs]
    rewards = beta * (logps - reference.of_answers(row).detach())
    margins = rewards[chosen] - rewards[rejected]
    losses = -F.logsigmoid(margins) * (1 - label_smoothing) - F.logsigmoid(-margins) * label_smoothing
    return Loss(losses.sum(), len(chosen), _metrics(rewards, logps, chosen, rejected))


def pairs(row: Row) -> tuple[list[int], list[int]]:
    """([pairs] chosen, [pairs] rejected): indices of the answers that belong together.

    Raises DocumentInvalid if an example has not exactly one of each.
    """
    by_example: dict[int, tuple[list[int], list[int]]] = {}
    for number, branch in enumerate(row.answers):
        by_example.setdefault(branch.example, ([], []))[0 if branch.is_chosen else 1].append(number)
    for example, (good, bad) in by_example.items():
        if (len(good), len(bad)) != (1, 1):
            raise DocumentInvalid(
                f"example {example} has {len(good)} chosen and {len(bad)} rejected answers; a pair has one of each"
            )
    return [good[0] for good, _ in by_example.values()], [bad[0] for _, bad in by_example.values()]


def _metrics(
    rewards: torch.Tensor, logps: torch.Tensor, chosen: list[int], rejected: list[int]
) -> dict[str, torch.Tensor]:
    rewards, logps = rewards.detach(), logps.detach()
    margins = rewards[chosen] - rewards[rejected]
    return {
        "rewards/chosen": rewards[chosen].sum(),
        "rewards/rejected": rewards[rejected].sum(),
        "rewards/accuracies": (margins > 0).sum(),
        "rewards/margins": margins.sum(),
        "logps/chosen": logps[chosen].sum(),
        "logps/rejected": logps[rejected].sum(),
    }


class Scorer(Protocol):
    """Reads rows under the adapter in training: `training.adapted_model.AdaptedModel`."""

    def score(self, row: Row) -> TargetScores: ...

    def score_base(self, row: Row) -> TargetScores: ...


class Objective(Protocol):
    """The loss of one row."""

    def __call__(self, model: Scorer, row: Row) -> Loss: ...


@dataclass(frozen=True, slots=True)
class Sft:
    """Negative log-likelihood of the answers."""

    def __call__(self, model: Scorer, row: Row) -> Loss:
        return sft(model.score(row), row)


@dataclass(frozen=True, slots=True)
class Dpo:
    """Direct preference optimisation against the base model."""

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise OptionInvalid(f"beta is {self.beta}; it must be positive and finite")
        if not 0 <= self.label_smoothing < 0.5:
            raise OptionInvalid(f"the label smoothing is {self.label_smoothing}; it is from 0 to below 0.5")

    def __call__(self, model: Scorer, row: Row) -> Loss:
        with torch.no_grad():
            reference = model.score_base(row)
        return dpo(model.score(row), reference, row, beta=self.beta, label_smoothing=self.label_smoothing)
