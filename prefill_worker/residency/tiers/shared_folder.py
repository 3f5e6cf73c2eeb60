"""This agent's folder in shared memory. The next agent removes it if this one is killed."""

from __future__ import annotations

from pathlib import Path

from adapters.files import locked_folder
from adapters.files.locked_folder import LockedFolder

SHARED_MEMORY = locked_folder.SHARED_MEMORY
_PREFIX = "prelude-adapters-"  # other programs use shared memory too


class SharedFolder(LockedFolder):
    """Created at once, removed by `close`."""

    def __init__(self, worker: str, parent: Path = SHARED_MEMORY) -> None:
        super().__init__(_PREFIX, worker, parent)


def sweep_abandoned(parent: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the folders that dead agents of this user left, and return them."""
    return locked_folder.sweep_abandoned(_PREFIX, parent)
