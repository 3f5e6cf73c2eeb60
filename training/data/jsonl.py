"""Reads JSONL files, one object a row. Rows are untrusted: each has a size limit and a name for messages."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import OptionInvalid

MAX_ROW_BYTES = 16 * 1024**2


class RowFault(Exception):
    """A row cannot be trained on. The message says why, without the row's name."""


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row of a file, not parsed yet."""

    where: str  # "train.jsonl, row 3", counted from 1 with blank rows
    line: bytes

    def fields(self) -> dict[str, Any]:
        """The row's object. Raises RowFault."""
        if len(self.line) > MAX_ROW_BYTES:
            raise RowFault(f"over {MAX_ROW_BYTES} bytes; split it into several rows")
        try:
            value = json.loads(self.line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RowFault(f"not UTF-8 at byte {error.start}; save the file as UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise RowFault(f"not JSON ({error}); each row is one JSON object") from None
        if not isinstance(value, dict):
            raise RowFault(f"a {type(value).__name__}, not an object with columns")
        return value


def read_rows(files: Sequence[Path]) -> Iterator[DataRow]:
    """The rows of the files in order, without blank ones. Raises OptionInvalid for a file that cannot be read."""
    for path in files:
        try:
            with path.open("rb") as file:
                number = 0
                # A row over the limit is cut there, so that no file can take all memory.
                while line := file.readline(MAX_ROW_BYTES + 1):
                    number += 1
                    yield from _row(path, number, line)
                    while len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
                        line = file.readline(MAX_ROW_BYTES + 1)
        except OSError as error:
            raise OptionInvalid(f"{path} cannot be read ({error.strerror}); name a JSONL file") from error


def _row(path: Path, number: int, line: bytes) -> Iterator[DataRow]:
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
    if line.strip():
        yield DataRow(f"{path}, row {number}", line)
