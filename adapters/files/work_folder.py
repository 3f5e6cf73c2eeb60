"""Folders for adapters' bytes on their way, which a process that is killed does not leave for ever."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from adapters.files import locked_folder
from adapters.files.locked_folder import SHARED_MEMORY, LockedFolder

Purpose = Literal["upload", "import", "export"]

_PREFIX = "prelude-work-"


class WorkFolder(LockedFolder):
    """A new folder in the folder for temporary files, made at once, removed by `close`. Blocking.

    One that is `in_memory` is in shared memory: what is in it is written to no disk.
    """

    def __init__(self, purpose: Purpose, *, in_memory: bool = False) -> None:
        super().__init__(_PREFIX, purpose, SHARED_MEMORY if in_memory else Path(tempfile.gettempdir()))


@contextmanager
def work_folder(purpose: Purpose) -> Iterator[Path]:
    """A new folder for as long as the block lasts. Blocking."""
    folder = WorkFolder(purpose)
    try:
        yield folder.path
    finally:
        folder.close()


def sweep_abandoned() -> list[Path]:
    """Removes the folders of processes of this user that have died; which ones. Blocking."""
    parents = dict.fromkeys((Path(tempfile.gettempdir()), SHARED_MEMORY))
    return [path for parent in parents for path in locked_folder.sweep_abandoned(_PREFIX, parent)]
