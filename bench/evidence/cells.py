"""Cells of the tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from bench.measuring.result_file import ResultFile

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"

Row = Sequence[str]


def result(name: str) -> ResultFile:
    """A file of bench/results/."""
    return ResultFile(RESULTS / name)


def fixed(value: float, num_digits: int) -> str:
    """Rounded half up from the digits that the file has."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-num_digits), ROUND_HALF_UP))


def markdown(head: Row, rows: Iterable[Row]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
