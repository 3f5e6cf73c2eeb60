"""The files that a benchmark writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.errors import BenchError


def require_folders(*paths: Path | None) -> None:
    """Before anything is measured: every path's folder is there. Raises BenchError."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchError(f"{path}: there is no folder {path.parent}")


def write_json(document: Mapping[str, Any], path: Path | None) -> None:
    """Write a result, if it is wanted; over an earlier state of it."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")
