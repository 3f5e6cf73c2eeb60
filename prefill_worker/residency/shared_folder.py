"""A folder of this agent's own in shared memory, which does not outlive it for long.

The agent holds a lock on the folder. One whose lock nobody holds belongs to an agent that has died, and the next agent
to start removes it. Locks, unlike process ids, mean the same in every container that shares /dev/shm. Linux only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "prelude-"


class SharedFolder:
    """Made at once, removed by `close`."""

    def __init__(self, worker: str, parent: Path = SHARED_MEMORY) -> None:
        while True:
            self.path = parent / f"{_PREFIX}{worker}-{uuid.uuid4().hex[:12]}"
            self.path.mkdir(mode=0o700)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if _lock(descriptor) and _is_at(descriptor, self.path):  # else a starting agent took it for abandoned
                break
            os.close(descriptor)
        self._descriptor = descriptor

    def close(self) -> None:
        """Remove the folder. What is mapped of it stays for who has mapped it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def sweep_abandoned(parent: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the folders of agents of this user that have died; which ones."""
    removed = []
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # no folder, gone, or somebody else's
        try:
            if os.fstat(descriptor).st_uid == os.getuid() and _lock(descriptor):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
        finally:
            os.close(descriptor)
    return removed


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
