"""Folders for adapters' bytes on their way, which a process that is killed does not leave for ever.

A process holds a lock on each of its folders. One whose lock nobody holds was left by a process that has died, and is
removed by the next one that sweeps. Locks, unlike process ids, mean the same in every container that shares the
folder's parent. Linux only.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

Purpose = Literal["upload", "import", "export"]

# A name of ours and of nobody else's: other programs' folders, and those without locks, are left alone.
_NAME = re.compile(r"prelude-(upload|import|export)-locked-[0-9a-f]{16}")


class WorkFolder:
    """A new folder in the folder for temporary files, made at once, removed by `close`. Blocking."""

    def __init__(self, purpose: Purpose) -> None:
        while True:
            self.path = Path(tempfile.gettempdir()) / f"prelude-{purpose}-locked-{uuid.uuid4().hex[:16]}"
            self.path.mkdir(mode=0o700)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if _lock(descriptor) and _is_at(descriptor, self.path):  # else it was taken for abandoned
                break
            os.close(descriptor)
        self._descriptor = descriptor

    def close(self) -> None:
        """Removes the folder with what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


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
    removed = []
    for path in Path(tempfile.gettempdir()).glob("prelude-*-locked-*"):
        if _NAME.fullmatch(path.name) is None:
            continue
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
