"""What one worker keeps of the adapters, as it says it over its control stream."""

from __future__ import annotations

from collections.abc import Set

from cluster.control import control_pb2 as control


class WorkerResidency:
    """Revision ids in a worker's engine and on its disk, and those that it has and no store.

    One for each control stream, kept current by its WorkerLink alone and shared by all WorkerViews that it makes:
    copying 100,000 ids for each state would cost more than all the rest. So it is the one part of a view that changes,
    and its sets are to be read, not kept.
    """

    def __init__(self) -> None:
        self._host: set[str] = set()
        self._disk: set[str] = set()
        self._memory_only: set[str] = set()

    @property
    def host(self) -> Set[str]:
        """What the next request can use at once."""
        return self._host

    @property
    def disk(self) -> Set[str]:
        return self._disk

    @property
    def memory_only(self) -> Set[str]:
        """What no store has, but this worker's memory: it can use it, once its engine is up if that is not."""
        return self._memory_only

    def can_use_unstored(self, revision_id: str) -> bool:
        """True where the worker has a revision that it could not get anywhere."""
        return revision_id in self._memory_only or revision_id in self._host

    def apply(self, delta: control.ResidencyDelta) -> None:
        """Takes over what changed. A snapshot that comes in several messages is whole after the last one."""
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
