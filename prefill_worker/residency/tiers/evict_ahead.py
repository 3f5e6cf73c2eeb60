"""How many adapters to evict ahead of demand, while more are requested than fit in host memory.

Evicting ahead lowers the memory's effective capacity, so it must stop where the working set just fits. Adapters evicted
ahead are therefore remembered for as long as their bytes are still free (a ghost list). A request for one of them is a
load that eviction ahead has caused: the goal falls back to zero. A request that would have lacked room in any case
raises the goal. A working set that just fits is reloaded once and then stays.
"""

from collections import OrderedDict

_MAX_FRACTION = 8  # at most one eighth of the evictable bytes
_MAX_ADAPTERS = 8  # of the size that was short last: about as many as load concurrently
_MIN_SHORT = 2  # shortages before the first eviction ahead: with 33 adapters and room for 32 most come back


class EvictAhead:
    """The eviction-ahead goal, and the ghost list that bounds it."""

    def __init__(self) -> None:
        self.num_bytes = 0  # of the ghosts; never more than are free
        self._ghosts: OrderedDict[str, int] = OrderedDict()  # revision -> bytes, the oldest first
        self._num_short = 0  # shortages since the last ghost was requested

    def reserve(self, revision_id: str, num_bytes: int, free_bytes: int) -> bool:
        """Note a reservation. True if it would lack room even without eviction ahead."""
        if revision_id in self._ghosts:
            self._forget(revision_id)
            self._num_short = 0
        is_short = num_bytes > free_bytes - self.num_bytes
        self._num_short += is_short
        self.limit(free_bytes - num_bytes)
        return is_short

    def goal_bytes(self, num_bytes: int, evictable_bytes: int) -> int:
        """Bytes to keep free after a reservation of `num_bytes` was short."""
        num_adapters = min(self._num_short - _MIN_SHORT, _MAX_ADAPTERS, evictable_bytes // _MAX_FRACTION // num_bytes)
        return max(num_adapters, 0) * num_bytes

    def add(self, revision_id: str, num_bytes: int) -> None:
        """Remember an adapter that was evicted ahead."""
        self._ghosts[revision_id] = num_bytes
        self.num_bytes += num_bytes

    def limit(self, free_bytes: int) -> None:
        """Forget the oldest ghosts beyond the free bytes: demand would have evicted them by now."""
        while self._ghosts and self.num_bytes > free_bytes:
            self._forget(next(iter(self._ghosts)))

    def _forget(self, revision_id: str) -> None:
        self.num_bytes -= self._ghosts.pop(revision_id)
