"""What processes map, by their own account."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from process.mapped_files import descendants, mapped_among

NOBODY = 2**22 + 1  # beyond the largest pid


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mapped-") as made:
        yield Path(made)


def test_a_file_is_found_while_it_is_mapped(folder: Path) -> None:
    paths = [folder / name for name in ("report 1", "report 2", "other")]
    for path in paths:
        path.write_bytes(b"\0" * mmap.PAGESIZE)
    reports = [*paths[:2], folder / "report that is gone"]
    assert mapped_among(reports, [os.getpid()]) == set()
    with paths[0].open("r+b") as first, paths[2].open("r+b") as other:
        with mmap.mmap(first.fileno(), 0), mmap.mmap(other.fileno(), 0):
            assert mapped_among(reports, [NOBODY, os.getpid()]) == {paths[0]}
            assert mapped_among(reports, [NOBODY]) == set()
        assert mapped_among(reports, [os.getpid()]) == set()


def test_a_semaphore_is_found_though_it_was_mapped_under_another_name() -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    path = Path(f"/dev/shm/sem.{lock._semlock.name.lstrip('/')}")  # type: ignore[attr-defined]
    assert mapped_among([path], [os.getpid()]) == {path}


def test_descendants():
    assert descendants(NOBODY) == []
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo ready; wait"], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "ready\n"
        (sleep,) = descendants(shell.pid)
        assert {shell.pid, sleep} <= {*descendants(os.getpid())}
        os.kill(sleep, signal.SIGKILL)
