"""Folders of processes: one that others sweep meanwhile has its own in the end, a dead one's is swept."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from adapters.files import locked_folder
from adapters.files.locked_folder import LockedFolder, sweep_abandoned


def test_a_sweep_before_the_folder_is_opened(tmp_path: Path, monkeypatch):
    real, swept = os.open, []

    def sweeping_open(path: Any, *words: Any, **named: Any) -> int:
        if not swept:
            swept.append(path)
            assert sweep_abandoned("x-", tmp_path) == [path]
        return real(path, *words, **named)

    monkeypatch.setattr(locked_folder.os, "open", sweeping_open)
    folder = LockedFolder("x-", "me", tmp_path)
    assert swept != [folder.path]
    assert sweep_abandoned("x-", tmp_path) == []
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_many_make_folders_while_others_sweep(tmp_path: Path):
    def make(number: int) -> None:
        if number % 2:
            sweep_abandoned("x-", tmp_path)
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
    assert sweep_abandoned("x-", tmp_path) == [tmp_path / "x-unmarked"]
    assert {path.name for path in tmp_path.iterdir()} == {"x-file", "target", "x-link", "x-theirs"}
