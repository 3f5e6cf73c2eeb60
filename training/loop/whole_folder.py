"""Folders that are replaced atomically, even if the process is killed.

A new folder is written as `.NAME.partial`, made durable, and renamed to `.NAME.new`, by which it is whole. Then NAME
becomes `.NAME.old`, `.NAME.new` becomes NAME, and `.NAME.old` is removed. `settle` finishes that after a kill.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from adapters.files.durable import fsync


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Give `target` what `write` puts into the folder that it gets. On an OSError `target` is as it was."""
    partial, new, _ = _beside(target)
    settle(target)
    partial.mkdir()
    try:
        write(partial)
        for path in (*partial.rglob("*"), partial):
            fsync(path)
        partial.rename(new)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    fsync(target.parent)
    settle(target)


def settle(target: Path) -> None:
    """Finish a replacement that was interrupted once its folder was whole; remove the rest of any other."""
    partial, new, old = _beside(target)
    shutil.rmtree(partial, ignore_errors=True)
    if new.exists():
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        new.rename(target)
        fsync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _beside(target: Path) -> tuple[Path, Path, Path]:
    partial, new, old = (target.with_name(f".{target.name}.{state}") for state in ("partial", "new", "old"))
    return partial, new, old
