"""The files of exports: the next one is made beforehand, and nothing of them stays."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from adapters.files.work_folder import WorkFolder
from adapters.packed import PACKED_NAME
from training.trainable import exports
from training.trainable.exports import Exports


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of all files, in the order in which they were made."""
    folders: list[Path] = []

    class Noted(WorkFolder):
        def __init__(self, *of: Any, **where: Any) -> None:
            super().__init__(*of, **where)
            folders.append(self.path)

    monkeypatch.setattr(exports, "WorkFolder", Noted)
    return folders


def assert_removed(folders: list[Path]) -> None:
    for thread in threading.enumerate():
        if thread.name == "export":
            thread.join()
    assert not any(each.exists() for each in folders)


def test_the_next_file_of_that_size_is_there(made: list[Path]):
    files = Exports()
    files.prepare(10_000)
    with files.file(10_000, in_memory=True) as file:
        file.mapped[:] = b"x" * 10_000
        assert file.folder == made[0]
        assert (file.folder / PACKED_NAME).read_bytes() == b"x" * 10_000
        os.link(file.folder / PACKED_NAME, kept := Path(f"{file.folder}-kept"))  # as a worker does
    try:
        files.prepare(10_000)
        with files.file(10_000, in_memory=True) as file:
            assert bytes(file.mapped[:]) == bytes(10_000)
        assert kept.read_bytes() == b"x" * 10_000
    finally:
        kept.unlink()
    assert_removed(made)


@pytest.mark.parametrize(("num_bytes", "in_memory"), [(9_999, True), (10_000, False)])
def test_other_exports_get_a_new_file(made: list[Path], num_bytes: int, in_memory: bool):
    files = Exports()
    files.prepare(10_000)
    with files.file(num_bytes, in_memory=in_memory) as file:
        assert len(file.mapped) == num_bytes
        assert made == [made[0], file.folder]
    files.prepare(10_000)
    files.close()
    files.prepare(10_000)  # by a thread that was late
    assert_removed(made)


def test_without_room_the_next_export_fails_and_not_this_one(made: list[Path], monkeypatch: pytest.MonkeyPatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = Exports()
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        files.prepare(10_000)
        with pytest.raises(OSError, match="No space left"), files.file(10_000, in_memory=True):
            pass
    with files.file(10_000, in_memory=True):
        pass
    assert len(made) == 3
    assert_removed(made)
