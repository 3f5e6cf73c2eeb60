"""This agent's folder in shared memory. The next agent removes it if this one is killed."""

from __future__ import annotations

import shutil
from pathlib import Path

from adapters.files import locked_folder
from adapters.files.locked_folder import LockedFolder
from cluster.errors import StartError
from cluster.host_memory import gib

SHARED_MEMORY = locked_folder.SHARED_MEMORY
_PREFIX = "prelude-adapters-"  # other programs use shared memory too


class SharedFolder(LockedFolder):
    """Created immediately, removed by `close`. `reserved_bytes`: the agent's budget; 0: none is set."""

    def __init__(self, worker: str, parent: Path = SHARED_MEMORY, reserved_bytes: int = 0) -> None:
        super().__init__(_PREFIX, worker, parent, note=str(reserved_bytes))
        self._reserved_bytes = reserved_bytes

    def check_room(self) -> None:
        """Raise StartError if earlier agents' reservations on this host leave too little shared memory for this one.

        If agents start simultaneously, at least one of them starts successfully.
        """
        total, taken = shutil.disk_usage(self.path.parent).total, {}
        for path, note in locked_folder.living(_PREFIX, self.path.parent).items():  # the oldest first
            if path == self.path:
                break
            if note.isdecimal() and int(note):
                taken[path.name] = int(note)
        if self._reserved_bytes + sum(taken.values()) <= total or not self._reserved_bytes:
            return
        parts = [
            f"{gib(self._reserved_bytes)} of residency.host_bytes",
            *(f"{gib(taken[each])} of {each}" for each in taken),
        ]
        raise StartError(
            f"{' + '.join(parts)} = {gib(self._reserved_bytes + sum(taken.values()))}, and {self.path.parent} has "
            f"{gib(total)}; lower residency.host_bytes, or give this host more shared memory"
        )


def sweep_abandoned(parent: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the folders that dead agents of this user left, and return them."""
    return locked_folder.sweep_abandoned(_PREFIX, parent)
