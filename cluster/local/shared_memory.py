"""Finds and removes shared memory of killed engines. Linux only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from process.lifetime import is_alive

_SHARED_MEMORY = Path("/dev/shm")


def segments() -> set[Path]:
    """Existing segments and semaphores of the kinds that engines create: SGLang's load reports, Python's, UCX's."""
    kinds = ("sglang_*", "sem.mp-*", "psm_*", "ucx_*")
    return {path for kind in kinds for path in _SHARED_MEMORY.glob(kind)}


def remove_if_abandoned(path: Path) -> None:
    """Remove a segment of this user that no live process maps."""
    with contextlib.suppress(OSError):
        if path.stat().st_uid != os.getuid():
            return
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if is_alive(int(maps.parent.name)) and str(path) in maps.read_text():
                return
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
