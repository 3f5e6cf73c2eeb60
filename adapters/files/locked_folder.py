"""Folders of one process, swept by others after its death.

A process holds a lock on its folder. A folder without a lock belongs to a dead process, and the next process of the
same kind removes it when it starts. Locks, unlike process ids, mean the same in all containers that share a file
system. A folder with such a name but without our mark belongs to another program and is left alone. Linux only.
"""

import fcntl
import os
import shutil
import uuid
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_MARK = ".prelude-locked-folder"


class LockedFolder:
    """A folder, created at once and removed by `close`. `sweep_abandoned` takes the same `prefix`."""

    def __init__(self, prefix: str, owner: str, parent: Path) -> None:
        while True:
            self.path = parent / f"{prefix}{owner}-{uuid.uuid4().hex[:12]}"
            self.path.mkdir(mode=0o700)
            # Until it is locked, a sweep may take it for abandoned.
            try:
                descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            if _lock(descriptor) and _is_at(descriptor, self.path):
                break
            os.close(descriptor)
        self._descriptor = descriptor
        (self.path / _MARK).touch()

    def close(self) -> None:
        """Remove the folder. Existing memory maps of its files stay valid."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def sweep_abandoned(prefix: str, parent: Path) -> list[Path]:
    """Remove the folders of this user's dead processes; return their paths."""
    removed = []
    for path in parent.glob(f"{prefix}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # no folder, gone, or another user's
        try:
            if os.fstat(descriptor).st_uid == os.getuid() and _lock(descriptor) and _is_marked(descriptor):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
        finally:
            os.close(descriptor)
    return removed


def _is_marked(descriptor: int) -> bool:
    """True for a marked folder, and for an empty one, whose owner died before it could mark it."""
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
