"""Averages of metrics over tokens or pairs. Checkpoints keep the sums."""

import math
from collections.abc import Mapping

from training.losses import Loss

_LOSS = "loss"


class Averages:
    """Sums of metrics and of their weights."""

    def __init__(self, sums: Mapping[str, tuple[float, float]] | None = None) -> None:
        self._sums = {name: list(pair) for name, pair in (sums or {}).items()}

    def add(self, name: str, total: float, weight: float) -> None:
        pair = self._sums.setdefault(name, [0.0, 0.0])
        pair[0] += total
        pair[1] += weight

    def add_loss(self, loss: Loss) -> None:
        """Add a row's loss and metrics. Waits for the device."""
        self.add(_LOSS, float(loss.total.detach()), loss.weight)
        for name, value in loss.metrics.items():
            self.add(name, float(value), loss.weight)

    def means(self) -> dict[str, float]:
        """By name, in the order in which they came first."""
        return {name: total / weight if weight else math.nan for name, (total, weight) in self._sums.items()}

    def sums(self) -> dict[str, tuple[float, float]]:
        return {name: (total, weight) for name, (total, weight) in self._sums.items()}
