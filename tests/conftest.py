"""What holds for every test."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

import pytest

_folder: str | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process that runs the tests.

    Tests send Ctrl-C to what they start; a shell's `&` starts us with it ignored, which children would inherit.
    Tests also look for files that were left behind, so each of several processes has a temporary folder of its own.
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
