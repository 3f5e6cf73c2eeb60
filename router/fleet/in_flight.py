"""Counts this router's sequences in flight at each worker."""

from __future__ import annotations

from collections.abc import Mapping


class InFlightState:
    """The only owner of these counts: what was placed on a worker and has not ended there."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def hold(self, worker: str) -> Hold:
        """Count one more at a worker until the hold is released."""
        self._counts[worker] = self._counts.get(worker, 0) + 1
        return Hold(self._counts, worker)

    @property
    def counts(self) -> Mapping[str, int]:
        return dict(self._counts)


class Hold:
    """One sequence counted at one worker."""

    def __init__(self, counts: dict[str, int], worker: str) -> None:
        self._counts = counts
        self._worker: str | None = worker

    def release(self) -> None:
        """Idempotent, because several paths notice the end of a sequence."""
        if self._worker is not None:
            self._counts[self._worker] -= 1
            self._worker = None
