"""The revisions that one worker holds, as reported by its control stream."""

from __future__ import annotations

from collections.abc import Set

from cluster.control import control_pb2 as control


class WorkerResidency:
    """Revision ids in a worker's host memory and on its disk, and those that only its memory has.

    There is one per control stream. Only its WorkerLink updates it. All WorkerViews of that stream share it, because
    copying 100,000 ids for each view would cost too much. It is the only mutable part of a view: do not keep its sets.
    """

    def __init__(self) -> None:
        self._host: set[str] = set()
        self._disk: set[str] = set()
        self._memory_only: set[str] = set()

    @property
    def num_ids(self) -> int:
        """In all of its sets."""
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
            self._host.clear()
            self._disk.clear()
            self._memory_only.clear()
        self._host.update(delta.resident)
        self._host.difference_update(delta.evicted)
        self._disk.update(delta.on_disk)
        self._disk.difference_update(delta.off_disk)
        self._memory_only.update(delta.in_memory_only)
        self._memory_only.difference_update(delta.not_in_memory_only)
