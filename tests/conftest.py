"""What holds for every test: how tests are spread over processes, and what each process has of its own."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
WITH_ENGINES = (ROOT / "engine", ROOT / "cluster")

_folder: str | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process that runs the tests.

    Tests send Ctrl-C to what they start; a shell's `&` starts us with it ignored, which children would inherit.
    Tests also look for files that were left behind, so each of several processes has its own temporary folder.
    """
    global _folder
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # of pytest-xdist
        _folder = tempfile.mkdtemp(prefix="pt")  # short: engines have sockets in it, whose paths are bounded
        os.environ["TMPDIR"] = tempfile.tempdir = _folder


def pytest_unconfigure() -> None:
    if _folder is not None:
        shutil.rmtree(_folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests with engines form one group, so that engines of two processes never compete; others go by file.

    The group is the longest, so it starts first. In it the tests that share one cluster come last, so that it does not
    idle beside others' engines, and at the very end those that kill its processes.
    """

    def turn(item: pytest.Item) -> int:
        if item.path.is_relative_to(ROOT / "unit"):
            return 4
        if item.get_closest_marker("kills_the_cluster"):
            return 3
        return 2 if "cluster" in getattr(item, "fixturenames", ()) else 1

    items.sort(key=turn)
    for item in items:
        has_engine = any(item.path.is_relative_to(folder) for folder in WITH_ENGINES)
        item.add_marker(pytest.mark.xdist_group("engines" if has_engine else str(item.path.relative_to(ROOT))))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Restore the signal handlers that a test has replaced: an agent that stops leaves Ctrl-C deadly."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return (yield)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test marked `alone` waits for those of other processes and keeps them waiting; all others run side by side."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    # Locks need a file that every process finds, whatever is in it.
    with Path(__file__).open() as entrance, (ROOT.parent / "pyproject.toml").open() as running:
        fcntl.flock(entrance, fcntl.LOCK_EX)  # held while waiting to be alone, so that nobody overtakes
        fcntl.flock(running, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(entrance, fcntl.LOCK_UN)
        return (yield)
