"""What a process maps, by its own account."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from process.mapped_files import mapped_files


def test_a_file_is_found_while_it_is_mapped(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("report 1", "report 2", "other")]
    for path in paths:
        path.write_bytes(b"\0" * mmap.PAGESIZE)
    pattern = f"{tmp_path}/report*"
    assert mapped_files(os.getpid(), pattern) == set()
    with paths[0].open("r+b") as first, paths[2].open("r+b") as other:
        with mmap.mmap(first.fileno(), 0), mmap.mmap(other.fileno(), 0):
            assert mapped_files(os.getpid(), pattern) == {paths[0]}
        assert mapped_files(os.getpid(), pattern) == set()


def test_nobody_maps_nothing() -> None:
    assert mapped_files(2**22 + 1, "*") == set()  # beyond the largest pid
