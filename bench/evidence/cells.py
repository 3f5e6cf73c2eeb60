"""Cells of the tables: rates, ratios, numbers, commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from bench.measuring.result_file import ResultFile

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"

GPU_COUNTS = (1, 8, 32, 128, 512)  # adapters in use
_COMMAND_WIDTH = 100

Row = Sequence[str]


def result(name: str) -> ResultFile:
    """A file of bench/results/."""
    return ResultFile(RESULTS / name)


def rates(file: ResultFile, system: str, counts: Sequence[int] = GPU_COUNTS) -> list[str]:
    """Requests/s with three digits; empty where they were not measured."""
    measured = [file.rate(system, n) for n in counts]
    return ["" if rate is None else fixed(rate, 0 if rate >= 99.95 else 1) for rate in measured]


def rates_and_ratios(file: ResultFile, system: str, counts: Sequence[int] = GPU_COUNTS) -> list[str]:
    """Requests/s, in parentheses relative to no adapters in the same run."""
    relative = texts(ratios(file, system, "none", counts))
    return [f"{rate} ({ratio})" for rate, ratio in zip(rates(file, system, counts), relative, strict=True)]


def ratios(file: ResultFile, system: str, to: str, counts: Sequence[int] = GPU_COUNTS) -> list[float]:
    return [_quotient(file.rate(system, n), file.rate(to, n)) for n in counts]


def latency_ratios(file: ResultFile, system: str, counts: Sequence[int] = GPU_COUNTS) -> list[float]:
    return [_quotient(file.latency_s("none", n), file.latency_s(system, n)) for n in counts]


def _quotient(of: float | None, to: float | None) -> float:
    assert of is not None
    assert to is not None
    return of / to


def texts(values: Iterable[float]) -> list[str]:
    return [fixed(value, 2) for value in values]


def fixed(value: float, num_digits: int) -> str:
    """Rounded half up from the digits that the file has."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-num_digits), ROUND_HALF_UP))


def wrapped(command: str) -> str:
    """A command over several lines, as a shell takes it; an option's value stays beside it."""
    parts: list[str] = []
    for word in shlex.split(command):
        quoted = shlex.quote(word)
        if word.startswith("--") or not parts:
            parts.append(quoted)
        else:
            parts[-1] += f" {quoted}"
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) < _COMMAND_WIDTH:
            lines[-1] += f" {part}"
        else:
            lines[-1] += " \\"
            lines.append(f"  {part}")
    return "\n".join(lines)


def columns(counts: Sequence[int]) -> list[str]:
    return [f"n = {counts[0]}", *(str(n) for n in counts[1:])]


def markdown(head: Row, rows: Iterable[Row]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
