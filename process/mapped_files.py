"""Which files processes map. Linux only."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil


def mapped_among(paths: Iterable[Path], pids: Iterable[int]) -> set[Path]:
    """Those of the files of a tmpfs that one of the processes maps.

    Files are compared by device and inode: a process maps a new semaphore before it gets its final name, and `maps`
    keeps showing the first one.
    """
    files: dict[tuple[str, str], Path] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"  # as `maps` has it
            files[device, str(status.st_ino)] = path
    found: set[Path] = set()
    for pid in pids if files else ():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, _, _, device, inode, *_ = line.split(maxsplit=5)
                if (device, inode) in files:
                    found.add(files[device, inode])
    return found


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have; none once it has ended."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
