"""Folders for adapters' bytes in transit, swept after a killed process."""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

from adapters.files import locked_folder
from adapters.files.locked_folder import SHARED_MEMORY, LockedFolder

Purpose = Literal["upload", "import", "export", "backup"]

_PREFIX = "prelude-work-"


class WorkFolder(LockedFolder):
    """A new folder among the temporary files, removed by `close`. Blocking.

    With `in_memory` it is in shared memory, so that nothing in it is written to a disk.
    """

    def __init__(self, purpose: Purpose, *, in_memory: bool = False) -> None:
        super().__init__(_PREFIX, purpose, SHARED_MEMORY if in_memory else Path(tempfile.gettempdir()))


@contextmanager
def work_folder(purpose: Purpose) -> Iterator[Path]:
    """A new WorkFolder for the duration of the block. Blocking."""
    with closing(WorkFolder(purpose)) as folder:
        yield folder.path


def sweep_abandoned() -> list[Path]:
    """Remove the folders of this user's dead processes; return their paths. Blocking."""
    parents = dict.fromkeys((Path(tempfile.gettempdir()), SHARED_MEMORY))
    return [path for parent in parents for path in locked_folder.sweep_abandoned(_PREFIX, parent)]
