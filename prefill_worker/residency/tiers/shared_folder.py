"""A folder of this agent's own in shared memory, which does not outlive it for long."""

from __future__ import annotations

from pathlib import Path

from adapters.files import locked_folder
from adapters.files.locked_folder import LockedFolder

SHARED_MEMORY = locked_folder.SHARED_MEMORY
_PREFIX = "prelude-adapters-"  # another program's temporary files may lie there, too


class SharedFolder(LockedFolder):
    """Made at once, removed by `close`."""

    def __init__(self, worker: str, parent: Path = SHARED_MEMORY) -> None:
        super().__init__(_PREFIX, worker, parent)


def sweep_abandoned(parent: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the folders of agents of this user that have died; which ones."""
    return locked_folder.sweep_abandoned(_PREFIX, parent)
