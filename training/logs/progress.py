"""A progress bar on terminals; elsewhere, a line per log entry."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from training.logs.log import Metrics

_SHOWN = ("loss", "eval_loss", "learning_rate", "mean_token_accuracy", "eval_mean_token_accuracy", "rewards/margins")


class ProgressLog:
    """On a terminal a bar with the newest numbers, elsewhere lines."""

    def __init__(self, num_steps: int, stream: TextIO | None = None) -> None:
        """`stream`: default stderr."""
        self._num_steps, self._stream = num_steps, stream or sys.stderr
        self._bar: Any = None

    def begin(self, step: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=self._num_steps,
            initial=step,
            unit="step",
            file=self._stream,
            disable=not self._stream.isatty(),
        )

    def write(self, step: int, metrics: Metrics) -> None:
        shown = {name: f"{value:.4g}" for name in _SHOWN if (value := metrics.get(name)) is not None}
        if not self._bar.disable:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            numbers = "  ".join(f"{name} {value}" for name, value in shown.items())
            print(f"step {step}/{self._num_steps}  {numbers}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
