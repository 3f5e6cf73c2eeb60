"""The training objectives, computed from a row's scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from training.errors import OptionInvalid
from training.losses import Loss, dpo, sft
from training.scores import TargetScores
from training.tree.rows import Row


class Scorer(Protocol):
    """Reads rows under the adapters in training: `training.adapted_model.AdaptedModel`."""

    def score(self, row: Row) -> TargetScores: ...


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
            reference = model.score(row.without_slots())
        return dpo(model.score(row), reference, row, beta=self.beta, label_smoothing=self.label_smoothing)
