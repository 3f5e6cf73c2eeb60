"""The files that a benchmark writes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.errors import BenchError


def require_folders(*paths: Path | None) -> None:
    """Before anything is measured: every path can be that of a file. Raises BenchError."""
    for path in paths:
        if path is None:
            continue
        folder = path.absolute().parent
        if not folder.is_dir():
            raise BenchError(f"{path}: there is no folder {path.parent}")
        if path.is_dir():
            raise BenchError(f"{path} is a folder; name a file")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise BenchError(f"{path} cannot be written to; name another file")


def write_json(document: Mapping[str, Any], path: Path | None) -> None:
    """Write a result, if it is wanted; over an earlier state of it. Raises BenchError."""
    if path is not None:
        write_text(json.dumps(document, indent=1) + "\n", path)


@contextlib.contextmanager
def growing_json(document: dict[str, Any], path: Path | None, last: str) -> Iterator[Callable[[], None]]:
    """A function that writes the document as it is by then, so that a run that is killed leaves what it measured.

    Its `ended` is "early" until the context ends without an error, then `last`. A file that is there stays until
    something is measured. Raises BenchError, as `write_json` does.
    """
    document["ended"] = "early"
    is_written = False

    def write() -> None:
        nonlocal is_written
        is_written = True
        write_json(document, path)

    try:
        yield write
        document["ended"] = last
        write()
    except BenchError as error:
        document["ended"] = f"early: {error}"
        if is_written:
            write()
        raise


def write_text(text: str, path: Path) -> None:
    """Write a report, in UTF-8. Raises BenchError, as of a full disk."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror or error}") from error
