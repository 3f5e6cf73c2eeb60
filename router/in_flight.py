"""How many of this router's requests each worker has. The one owner of these counts."""

from __future__ import annotations

from collections.abc import Mapping


class InFlightState:
    """Counts legs that were sent and have not ended."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def enter(self, worker: str) -> None:
        self._counts[worker] = self._counts.get(worker, 0) + 1

    def leave(self, worker: str) -> None:
        self._counts[worker] -= 1

    @property
    def counts(self) -> Mapping[str, int]:
        return dict(self._counts)
