"""What one worker keeps of the adapters, as it says it over its control stream."""

from __future__ import annotations

from collections.abc import Set

from cluster import control_pb2 as control


class Residency:
    """Revision ids in a worker's host memory and on its disk.

    One for each control stream, kept current by its WorkerLink alone and shared by all WorkerViews that it makes:
    copying 100,000 ids for each state would cost more than all the rest. So it is the one part of a view that changes,
    and `host` and `disk` are to be read, not kept.
    """

    def __init__(self) -> None:
        self._host: set[str] = set()
        self._disk: set[str] = set()

    @property
    def host(self) -> Set[str]:
        """What the next request can use at once."""
        return self._host

    @property
    def disk(self) -> Set[str]:
        return self._disk

    def apply(self, delta: control.ResidencyDelta) -> None:
        """Takes over what changed. A snapshot that comes in several messages is whole after the last one."""
        if delta.snapshot:
            self._host.clear()
            self._disk.clear()
        self._host.update(delta.resident)
        self._host.difference_update(delta.evicted)
        self._disk.update(delta.on_disk)
        self._disk.difference_update(delta.off_disk)
