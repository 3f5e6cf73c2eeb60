"""How much of host memory is made free before anybody waits for it, and when: only while adapters do not fit.

What is evicted ahead of need would otherwise still be here. It is remembered, for as long as it would be, and tells
whether eviction ahead is worth it. Each adapter that lacks room, even if what is remembered is taken for being there,
lets a little more go; one that comes back, which need not have left, ends that for a while. So adapters that just fit
come back once and stay, and where they do not fit at all there is room before it is asked for.
"""

from __future__ import annotations

from collections import OrderedDict

_PART = 8  # one in so many of the bytes that can be evicted at all, at the most
_MOST_ADAPTERS = 8  # of the size that was short last: about as many as are loaded side by side
_PATIENCE = 2  # adapters that lack room before one goes for the next: of 33 that share the room of 32 most come back


class EvictAhead:
    """What has been evicted ahead of need."""

    def __init__(self) -> None:
        self.num_bytes = 0  # of what is remembered, never more than are free
        self._evicted: OrderedDict[str, int] = OrderedDict()  # revisions and their bytes, the first to go first
        self._num_short = 0  # that lacked room since one came back

    def take(self, revision_id: str, num_bytes: int, free_bytes: int) -> bool:
        """A revision is about to take room, of so many free bytes; whether it lacked any without what went ahead."""
        if revision_id in self._evicted:
            self._forget(revision_id)
            self._num_short = 0
        is_short = num_bytes > free_bytes - self.num_bytes
        self._num_short += is_short
        self.limit(free_bytes - num_bytes)
        return is_short

    def goal_bytes(self, num_bytes: int, evictable_bytes: int) -> int:
        """What is to be free for others now that one of so many bytes was short."""
        num_adapters = min(self._num_short - _PATIENCE, _MOST_ADAPTERS, evictable_bytes // _PART // num_bytes)
        return max(num_adapters, 0) * num_bytes

    def add(self, revision_id: str, num_bytes: int) -> None:
        """It was evicted ahead of need."""
        self._evicted[revision_id] = num_bytes
        self.num_bytes += num_bytes

    def limit(self, free_bytes: int) -> None:
        """Only so many bytes are free: the first that were evicted would have had to go by now."""
        while self._evicted and self.num_bytes > free_bytes:
            self._forget(next(iter(self._evicted)))

    def _forget(self, revision_id: str) -> None:
        self.num_bytes -= self._evicted.pop(revision_id)
