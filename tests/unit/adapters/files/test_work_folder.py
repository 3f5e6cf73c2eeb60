"""Folders of processes and for bytes on their way: nobody takes them from the living, and the dead leave none."""

import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapters.files import locked_folder
from adapters.files.locked_folder import LockedFolder
from adapters.files.locked_folder import sweep_abandoned as sweep
from adapters.files.work_folder import sweep_abandoned, work_folder

_OTHER = """
import time
from adapters.files.work_folder import WorkFolder

folder = WorkFolder("import")
(folder.path / "bytes").write_bytes(b"x" * 1000)
print(folder.path, flush=True)
time.sleep(120)
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_goes_with_its_block(parent: Path) -> None:
    with work_folder("import") as folder:
        (folder / "bytes").write_bytes(b"x")
        assert folder.parent == parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_a_killed_process_left_is_swept(parent: Path, in_memory: bool) -> None:
    (parent / "prelude-demo").mkdir()  # another's
    environment = {**os.environ, "TMPDIR": str(parent)}
    code = _OTHER.replace('"import")', f'"import", in_memory={in_memory})')
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        assert left.parent == (Path("/dev/shm") if in_memory else parent)
        assert left not in sweep_abandoned()  # it lives
        other.send_signal(signal.SIGKILL)
        other.wait()
        swept = sweep_abandoned()
        assert in_memory or left in swept  # another process's start may have swept shared memory
        assert not left.exists()
        assert list(parent.iterdir()) == [parent / "prelude-demo"]
    finally:
        other.kill()
        other.wait()


def test_a_sweep_before_the_folder_is_opened(tmp_path: Path, monkeypatch):
    real, swept = os.open, []

    def sweeping_open(path: Any, *words: Any, **named: Any) -> int:
        if not swept:
            swept.append(path)
            assert sweep("x-", tmp_path) == [path]
        return real(path, *words, **named)

    monkeypatch.setattr(locked_folder.os, "open", sweeping_open)
    folder = LockedFolder("x-", "me", tmp_path)
    assert swept != [folder.path]
    assert sweep("x-", tmp_path) == []
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_many_make_folders_while_others_sweep(tmp_path: Path):
    def make(number: int) -> None:
        if number % 2:
            sweep("x-", tmp_path)
            return
        folder = LockedFolder("x-", str(number), tmp_path)
        (folder.path / "file").write_text("mine")
        assert (folder.path / "file").read_text() == "mine"
        folder.close()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(make, range(2000)))
    assert list(tmp_path.iterdir()) == []


def test_what_others_have_under_such_names_stays(tmp_path: Path):
    (tmp_path / "x-file").write_text("a file")
    (tmp_path / "target").mkdir()
    (tmp_path / "x-link").symlink_to(tmp_path / "target")
    (tmp_path / "x-theirs").mkdir()
    (tmp_path / "x-theirs" / "file").write_text("another program's")
    (tmp_path / "x-unmarked").mkdir()  # whose process was killed before it could mark it
    assert sweep("x-", tmp_path) == [tmp_path / "x-unmarked"]
    assert {path.name for path in tmp_path.iterdir()} == {"x-file", "target", "x-link", "x-theirs"}
