"""A folder of this process's own, which does not outlive it for long.

The process holds a lock on the folder. One whose lock nobody holds belongs to a process that has died, and the next one
of its kind to start removes it. Locks, unlike process ids, mean the same in every container that shares a file system.
What carries the name of such a folder without its mark is another program's, and is left alone. Linux only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_MARK = ".prelude-locked-folder"


class LockedFolder:
    """Made at once, removed by `close`. `prefix` is the kind's, of which `sweep_abandoned` is told, too."""

    def __init__(self, prefix: str, owner: str, parent: Path) -> None:
        while True:
            self.path = parent / f"{prefix}{owner}-{uuid.uuid4().hex[:12]}"
            self.path.mkdir(mode=0o700)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if _lock(descriptor) and _is_at(descriptor, self.path):  # else a starting process took it for abandoned
                break
            os.close(descriptor)
        self._descriptor = descriptor
        (self.path / _MARK).touch()

    def close(self) -> None:
        """Remove the folder. What is mapped of it stays for who has mapped it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def sweep_abandoned(prefix: str, parent: Path) -> list[Path]:
    """Remove the folders of processes of this user that have died; which ones."""
    removed = []
    for path in parent.glob(f"{prefix}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # no folder, gone, or somebody else's
        try:
            if os.fstat(descriptor).st_uid == os.getuid() and _lock(descriptor) and _is_marked(descriptor):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
        finally:
            os.close(descriptor)
    return removed


def _is_marked(descriptor: int) -> bool:
    """Or empty, as its owner leaves it that dies before it has marked it."""
    names = os.listdir(descriptor)
    return not names or _MARK in names


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
