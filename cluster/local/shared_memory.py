"""Finds and removes shared memory of killed engines. Linux only."""

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from process.lifetime import is_alive
from process.mapped_files import descendants, mapped_among

_SHARED_MEMORY = Path("/dev/shm")
_INITIAL_PID, _INITIAL_IPC = "pid:[4026531836]", "ipc:[4026531839]"  # linux/proc_ns.h: 0xEFFFFFFC, 0xEFFFFFFF


def segments() -> set[Path]:
    """Existing segments and semaphores of the kinds that engines create: SGLang's, Python's, joblib's, UCX's."""
    kinds = ("sglang_*", "sgl_shm_*", "sem.mp-*", "sem.loky-*", "psm_*", "ucx_*")
    return {path for kind in kinds for path in _SHARED_MEMORY.glob(kind)}


def abandoned(paths: Collection[Path]) -> set[Path]:
    """Segments of this user that no live process maps."""
    mapped, found = mapped_among(paths, _live_processes()), set()
    for path in paths:
        with contextlib.suppress(OSError):
            if path not in mapped and path.stat().st_uid == os.getuid():
                found.add(path)
    return found


def mapped_below(pid: int) -> set[Path]:
    """Segments that the descendants of a process map."""
    return mapped_among(segments(), descendants(pid))


def remove_abandoned(paths: Collection[Path], own: Collection[Path] = ()) -> None:
    """Remove abandoned segments; only those of `own` where /dev/shm has users that this process cannot see."""
    for path in abandoned(paths if _sees_all_users() else {*paths} & {*own}):
        with contextlib.suppress(OSError):
            path.unlink()


def _sees_all_users() -> bool:
    """False in a container with the host's IPC namespace, and so its /dev/shm, but not its processes (`--ipc host`)."""
    pid, ipc = (Path(f"/proc/self/ns/{kind}").readlink().name for kind in ("pid", "ipc"))
    return pid == _INITIAL_PID or ipc != _INITIAL_IPC


def _live_processes() -> Iterator[int]:
    return (pid for pid in map(int, (path.name for path in Path("/proc").glob("[0-9]*"))) if is_alive(pid))
