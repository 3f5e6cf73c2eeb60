"""Folders for bytes on their way: nobody takes them from the living, and the dead leave none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from adapters.files.work_folder import WorkFolder, sweep_abandoned, work_folder

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
        assert list(parent.iterdir()) == []
    finally:
        other.kill()
        other.wait()


def test_what_is_in_use_stays(parent: Path) -> None:
    used = WorkFolder("upload")
    (parent / "prelude-demo").mkdir()
    assert not [path for path in sweep_abandoned() if path.parent == parent]  # shared memory is not this test's alone
    assert len(list(parent.iterdir())) == 2
    used.close()
    assert not used.path.exists()
