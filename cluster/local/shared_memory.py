"""Finds and removes shared memory of killed engines. Linux only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from process.lifetime import is_alive

_SHARED_MEMORY = Path("/dev/shm")


def segments() -> set[Path]:
    """Existing segments and semaphores of the kinds that engines create: SGLang's, Python's, UCX's."""
    kinds = ("sglang_*", "sgl_shm_*", "sem.mp-*", "psm_*", "ucx_*")
    return {path for kind in kinds for path in _SHARED_MEMORY.glob(kind)}


def abandoned(paths: Collection[Path]) -> set[Path]:
    """Segments of this user that no live process maps."""
    mapped, found = _mapped() if paths else set(), set()
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and (_device(status.st_dev), str(status.st_ino)) not in mapped:
                found.add(path)
    return found


def remove_abandoned(paths: Collection[Path]) -> None:
    """Remove abandoned segments."""
    for path in abandoned(paths):
        with contextlib.suppress(OSError):
            path.unlink()


def _mapped() -> set[tuple[str, str]]:
    """Device and inode of every file of shared memory that a live process maps.

    Names do not identify files here: a process maps a new semaphore before it gets its final name, and `maps` keeps
    showing the first one.
    """
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if is_alive(int(maps.parent.name)):
                lines = (
                    line.split(maxsplit=5) for line in maps.read_text().splitlines() if str(_SHARED_MEMORY) in line
                )
                found |= {(device, inode) for _, _, _, device, inode, _ in lines}
    return found


def _device(number: int) -> str:
    """As `maps` has it."""
    return f"{os.major(number):02x}:{os.minor(number):02x}"
