"""The log of a run, as a JSONL file."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

from training.errors import CheckpointNotWritten

Metrics = Mapping[str, float]


class Log(Protocol):
    """Gets every line of the log, in order."""

    def begin(self, step: int) -> None:
        """Training continues after this many steps; forget what was logged later."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""

    def close(self) -> None:
        """There will be no more. Raises nothing: what `write` took is on the disk, or `write` raised."""


class JsonlLog:
    """One JSON object a line, `step` last, as trl's `log_history`. A line that a kill cut off is removed by `begin`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def begin(self, step: int) -> None:
        """Raises CheckpointNotWritten."""
        try:
            self._file = self._path.open("a+", encoding="utf-8")
            os.ftruncate(self._file.fileno(), _num_bytes_until(self._path, step))
        except OSError as error:
            raise self._failed(error) from error

    def write(self, step: int, metrics: Metrics) -> None:
        """Raises CheckpointNotWritten if the disk is full."""
        assert self._file is not None, "begin comes first"
        try:
            self._file.write(json.dumps({**metrics, "step": step}) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a line that `write` has already failed with
                self._file.close()

    def _failed(self, error: OSError) -> CheckpointNotWritten:
        return CheckpointNotWritten(
            f"{self._path} cannot be written ({error.strerror or error}); the checkpoints are as they were. Make room "
            "and continue with --resume"
        )


def _num_bytes_until(path: Path, step: int) -> int:
    """How many bytes of the file are whole lines of steps up to this one."""
    kept = 0
    with path.open("rb") as file:
        for line in file:
            try:
                is_later = json.loads(line)["step"] > step
            except (ValueError, LookupError, TypeError):
                break
            if is_later or not line.endswith(b"\n"):
                break
            kept += len(line)
    return kept
