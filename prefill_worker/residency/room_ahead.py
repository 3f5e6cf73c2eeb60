"""How much of host memory is made free before anybody waits for it, and when: only as long as adapters do not fit.

What is evicted ahead of need would still be here otherwise. It is remembered: if it is asked for again, or room is
taken that it could have kept, less was short than it seemed. Adapters that just fit so come back and stay, and none of
them is evicted for the next one.
"""

from __future__ import annotations

from collections import OrderedDict

_MOST_PART = 8  # of the budget
_MOST_ADAPTERS = 8  # of the size that was asked for last: about as many as are loaded side by side


class RoomAhead:
    """What has been evicted ahead of need, and how many bytes are to be."""

    def __init__(self, budget_bytes: int) -> None:
        self.goal_bytes = 0
        self._budget_bytes = budget_bytes
        self._evicted: OrderedDict[str, int] = OrderedDict()  # revisions and their bytes, the first to go first
        self._evicted_bytes = 0

    def take(self, revision_id: str, num_bytes: int, free_bytes: int) -> bool:
        """A revision takes room, of so many free bytes; whether it lacked any, had nothing been evicted ahead."""
        self._forget(revision_id)
        self.goal_bytes = min(self._budget_bytes // _MOST_PART // num_bytes, _MOST_ADAPTERS) * num_bytes
        is_short = num_bytes > free_bytes - self._evicted_bytes
        while self._evicted and num_bytes > free_bytes - self._evicted_bytes:
            self._forget(next(iter(self._evicted)))  # it would have had to go now
        return is_short

    def add(self, revision_id: str, num_bytes: int) -> None:
        """It was evicted, and nobody waited for its room."""
        self._evicted[revision_id] = num_bytes
        self._evicted_bytes += num_bytes

    def _forget(self, revision_id: str) -> None:
        self._evicted_bytes -= self._evicted.pop(revision_id, 0)
