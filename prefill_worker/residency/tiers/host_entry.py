"""One adapter in host memory, and its states.

absent -> LOADING -> IN_MEMORY -> RESIDENT -> EVICTING -> absent
                         ^            |          |
                         |            +<---------+   eviction refused: in use by requests
                         +-- the engine ended, or may or may not have unloaded it
"""

import enum
import os
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from adapters.packed import PACKED_NAME
from adapters.store import Envelope


class HostState(enum.Enum):
    """State of a folder in host memory."""

    LOADING = "loading"  # room is reserved, the file is being written
    IN_MEMORY = "in memory"  # complete, but not known to be loaded by the engine
    RESIDENT = "resident"  # the engine can use it
    EVICTING = "evicting"


@dataclass(eq=False, slots=True)
class HostEntry:
    """One adapter in host memory."""

    revision_id: str  # also at a scale
    directory: Path
    num_bytes: int  # reserved, in whole pages
    state: HostState = HostState.LOADING
    envelope: Envelope | None = None  # None while loading
    lease_until_s: float = 0.0  # by the event loop's clock
    num_holds: int = 0  # copies and engine loads in progress
    may_be_in_engine: bool = False
    is_memory_only: bool = False  # pushed by a router and in no store: must never be written to the disk
    is_shared: bool = False  # other processes may have the packed file, too: it is not written over
    spare: Path | None = None  # folder of an evicted adapter of the same size, to be written over

    @property
    def packed(self) -> Path:
        return self.directory / PACKED_NAME

    def open_packed(self) -> FileIO:
        """Open the packed file for writing from its start; it may hold another adapter. Blocking. Raises OSError."""
        if self.spare is not None:
            with suppress(FileNotFoundError):  # removed by somebody else
                self.spare.rename(self.directory)
        self.directory.mkdir(exist_ok=self.spare is not None)
        return FileIO(self.packed, "r+", opener=_create)

    def share(self, path: Path, num_bytes: int) -> bool:
        """Have a file of this host and user, which nobody writes to any more, as packed file. False if that cannot be.

        Blocking. Raises OSError.
        """
        link = self.directory.with_name(f"{self.directory.name}.shared")
        try:
            os.link(path, link, follow_symlinks=False)
        except OSError:  # as on another host
            return False
        try:
            status = os.lstat(link)
            if (status.st_uid, status.st_size) != (os.getuid(), num_bytes):
                return False
            self.open_packed().close()
            os.replace(link, self.packed)
        finally:
            link.unlink(missing_ok=True)  # it would keep the file's memory
        self.is_shared = True
        return True


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o644)
