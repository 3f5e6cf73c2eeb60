"""A folder is replaced whole or not at all, wherever the process is killed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training.loop.whole_folder import replace_folder, settle

_OPERATIONS = ((Path, "mkdir"), (Path, "rename"), (Path, "write_text"), (os, "fsync"), (shutil, "rmtree"))


def written(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in ("a", "b"):
            (folder / name).write_text(text)
        (folder / "inner").mkdir()
        (folder / "inner" / "c").write_text(text)

    return write


def content(folder: Path) -> str | None:
    """The text that all of its files have; None if there is no folder."""
    if not folder.exists():
        return None
    (text,) = {(folder / name).read_text() for name in ("a", "b", "inner/c")}
    return text


class Killed(BaseException):
    """Nothing is done from here on, cleaning up included."""


def killed_before(operation: int, act: Callable[[], None]) -> bool:
    """Act as a process that is killed before its nth operation; True if it got there."""
    left = operation

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if left <= 0:
                raise Killed
            left -= 1
            return original(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _OPERATIONS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            act()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("before", [None, "old"])
def test_a_kill_before_any_operation_leaves_the_old_or_the_new(tmp_path: Path, before: str | None):
    outcomes = []
    for operation in range(100):
        folder = tmp_path / str(operation)
        folder.mkdir()
        target = folder / "last"
        if before is not None:
            replace_folder(target, written(before))
        was_killed = killed_before(operation, lambda target=target: replace_folder(target, written("new")))
        settle(target)
        outcomes.append(content(target))
        assert {each.name for each in folder.iterdir()} <= {"last"}
        if not was_killed:
            break
    assert outcomes[0] == before
    assert outcomes[-1] == "new"
    assert outcomes == sorted(outcomes, key=lambda each: each == "new")  # once it is new it stays new
    assert len(outcomes) > 8


def test_a_kill_while_it_is_settled_is_settled_again(tmp_path: Path):
    for operation in range(20):
        folder = tmp_path / str(operation)
        folder.mkdir()
        for name, text in (("last", "old"), (".last.new", "new"), (".last.old", "older")):
            (folder / name).mkdir()
            written(text)(folder / name)
        was_killed = killed_before(operation, lambda folder=folder: settle(folder / "last"))
        settle(folder / "last")
        assert content(folder / "last") == "new"
        assert [each.name for each in folder.iterdir()] == ["last"]
        if not was_killed:
            return
    raise AssertionError("settling never ended")
