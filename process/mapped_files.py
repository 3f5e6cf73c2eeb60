"""Which files a process maps. Linux only."""

from __future__ import annotations

import contextlib
from fnmatch import fnmatch
from pathlib import Path


def mapped_files(pid: int, pattern: str) -> set[Path]:
    """Paths of the files that match the pattern; none if there is no such process."""
    found: set[Path] = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fnmatch(fields[5], pattern):
                found.add(Path(fields[5]))
    return found
