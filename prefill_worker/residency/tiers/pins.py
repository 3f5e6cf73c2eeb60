"""Pins: memory-only revisions that routers have asked to keep, which must stay in host memory."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefill_worker.residency.errors import PinsExceedBudget


class Pins:
    """The pinned revisions, resident or not. One is pinned until it is released and no call pins it any more."""

    def __init__(self, budget_bytes: int, on_unpinned: Callable[[], None]) -> None:
        self._budget_bytes = budget_bytes
        self._on_unpinned = on_unpinned
        self._bytes: dict[str, int] = {}  # of each pinned revision, in host memory
        self._calls: Counter[str] = Counter()  # in progress
        self._kept: set[str] = set()  # calls for these have succeeded

    def __contains__(self, revision_id: str) -> bool:
        return revision_id in self._bytes

    def __iter__(self) -> Iterator[str]:
        return iter(self._bytes)

    def __len__(self) -> int:
        return len(self._bytes)

    @property
    def num_bytes(self) -> int:
        """Host memory that the pinned revisions take, resident or not."""
        return sum(self._bytes.values())

    def is_kept(self, revision_id: str) -> bool:
        """Whether the revision is pinned beyond calls in progress."""
        return revision_id in self._kept

    def release(self, revision_id: str) -> None:
        """Idempotent."""
        self._kept.discard(revision_id)
        self._forget_unpinned(revision_id)

    @contextmanager
    def pinning(self, revision_id: str, num_bytes: int) -> Iterator[None]:
        """Pin for a call that makes the revision resident and, if that succeeds, until `release`.

        Raises PinsExceedBudget on entry.
        """
        others = self.num_bytes - self._bytes.get(revision_id, 0)
        if others + num_bytes > self._budget_bytes:
            raise PinsExceedBudget(
                f"{revision_id} takes {num_bytes} bytes of host memory, and others that are in memory only take "
                f"{others} already, together more than residency.host_bytes of {self._budget_bytes}; move aliases away "
                "from others or raise it"
            )
        self._bytes[revision_id] = num_bytes
        self._calls[revision_id] += 1
        try:
            yield
            self._kept.add(revision_id)
        finally:
            self._calls[revision_id] -= 1
            self._forget_unpinned(revision_id)

    def _forget_unpinned(self, revision_id: str) -> None:
        if revision_id in self._bytes and not self._calls[revision_id] and revision_id not in self._kept:
            del self._bytes[revision_id], self._calls[revision_id]
            self._on_unpinned()
