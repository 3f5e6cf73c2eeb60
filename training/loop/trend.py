"""Whether a run's loss was still falling at its end, or had stopped, from the lines of its log."""

from statistics import fmean

from training.loop.log import Metrics

_LEAST_LINES = 8
_FALLING, _STILL = 0.05, 0.01  # of the loss, from one quarter of the run to the next


class Trend:
    """A log that keeps the training losses."""

    def __init__(self) -> None:
        self._losses: list[float] = []

    def begin(self, step: int) -> None: ...

    def write(self, step: int, metrics: Metrics) -> None:
        if "loss" in metrics:
            self._losses.append(metrics["loss"])

    def close(self) -> None: ...

    def advice(self, *, num_epochs: float, max_steps: int | None, is_prompt_only: bool) -> str:
        """What to try next; empty if nothing stands out or too little was logged.

        Compares the mean loss of the last quarter of the run with that of the quarter before it.
        """
        quarter = len(self._losses) // 4
        if len(self._losses) < _LEAST_LINES:
            return ""
        before, last = fmean(self._losses[-2 * quarter : -quarter]), fmean(self._losses[-quarter:])
        fell = (before - last) / before if before > 0 else 0.0
        if fell > _FALLING:
            longer = f"--max-steps {2 * max_steps}" if max_steps else f"--epochs {2 * num_epochs:g}"
            return f"the loss was still falling, by {fell:.0%} in the last quarter: try {longer}"
        if fell < _STILL and last > 0.5 * self._losses[0]:
            other = "; if that is too high, try --positions all" if is_prompt_only else ""
            return f"the loss has stalled at {last:.2f}{other}"
        return ""
