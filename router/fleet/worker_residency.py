"""The revisions that one worker holds, as reported by its control stream."""

from __future__ import annotations

from collections.abc import Iterable, Set

from cluster.control import control_pb2 as control
from router.fleet.holders import Holders


class WorkerResidency:
    """Revision ids in a worker's host memory and on its disk, and those that only its memory has.

    There is one per control stream, and only its WorkerLink updates it. All WorkerViews of the stream share it, because
    copying 100,000 ids for each view would cost too much. It is the only mutable part of a view. Its sets are changed
    in place: keep references to them no longer than a FleetState.
    """

    def __init__(self, holders: Holders | None = None) -> None:
        """`holders`: of the whole fleet, kept current until `leave`."""
        self._holders = holders
        self._host: set[str] = set()
        self._disk: set[str] = set()
        self._memory_only: set[str] = set()

    @property
    def num_ids(self) -> int:
        """Number of ids in all sets together."""
        return len(self._host) + len(self._disk) + len(self._memory_only)

    @property
    def host(self) -> Set[str]:
        """Resident: usable without a load."""
        return self._host

    @property
    def disk(self) -> Set[str]:
        return self._disk

    @property
    def memory_only(self) -> Set[str]:
        """In this worker's memory and in no store. Usable while its engine is up."""
        return self._memory_only

    def can_use_unstored(self, revision_id: str) -> bool:
        """True if the worker has this revision, which it could not fetch from a store."""
        return revision_id in self._memory_only or revision_id in self._host

    def apply(self, delta: control.ResidencyDelta) -> None:
        """Apply one message. A snapshot may take several, of which only the first is marked as one."""
        if delta.snapshot:
            self._evict(tuple(self._host))
            self._disk.clear()
            self._memory_only.clear()
        for revision_id in delta.resident:
            if revision_id not in self._host:
                self._host.add(revision_id)
                if self._holders is not None:
                    self._holders.add(revision_id, self)
        self._evict(delta.evicted)
        self._disk.update(delta.on_disk)
        self._disk.difference_update(delta.off_disk)
        self._memory_only.update(delta.in_memory_only)
        self._memory_only.difference_update(delta.not_in_memory_only)

    def leave(self) -> None:
        """Leave the fleet's index, because another control stream has taken over. What was reported stays readable."""
        if self._holders is not None:
            for revision_id in self._host:
                self._holders.discard(revision_id, self)
            self._holders = None

    def _evict(self, revision_ids: Iterable[str]) -> None:
        for revision_id in revision_ids:
            if revision_id in self._host:
                self._host.remove(revision_id)
                if self._holders is not None:
                    self._holders.discard(revision_id, self)
