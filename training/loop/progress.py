"""A progress bar on terminals; elsewhere, a line per log entry, or now and then one."""

import sys
import time
from typing import Any, TextIO

from training.loop.log import Metrics

_SHOWN = ("loss", "eval_loss", "learning_rate", "mean_token_accuracy", "eval_mean_token_accuracy", "rewards/margins")
_LINE_EVERY_S = 20.0


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


class Count:
    """How many of a known number are done. On a terminal a bar, elsewhere a line every 20 s."""

    def __init__(self, name: str, total: int, unit: str, stream: TextIO | None = None) -> None:
        """`stream`: default stderr."""
        from tqdm import tqdm

        self._name, self._total, self._unit, self._stream = name, total, unit, stream or sys.stderr
        self._num_done, self._next_line_at = 0, time.monotonic() + _LINE_EVERY_S
        self._bar = tqdm(desc=name, total=total, unit=unit, file=self._stream, disable=not self._stream.isatty())

    def add(self) -> None:
        """One more is done."""
        self._num_done += 1
        self._bar.update()
        if self._bar.disable and time.monotonic() >= self._next_line_at:
            self._next_line_at = time.monotonic() + _LINE_EVERY_S
            print(f"{self._name}: {self._num_done} of {self._total} {self._unit}s", file=self._stream, flush=True)

    def close(self) -> None:
        self._bar.close()
