"""The files that a benchmark writes."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.errors import BenchError, OptionInvalid


def require_folder(path: Path | None) -> None:
    """Before anything is measured: the path can be that of a file. Raises BenchError."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise OptionInvalid(f"{path}: there is no folder {path.parent}")
    if path.is_dir():
        raise OptionInvalid(f"{path} is a folder; name a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise OptionInvalid(f"{path} cannot be written to; name another file")


def write_json(document: Mapping[str, Any], path: Path | None) -> None:
    """Write a result, if it is wanted; over an earlier state of it. Raises BenchError, as of a full disk."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror or error}") from error
