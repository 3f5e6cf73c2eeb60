"""Reads back what a benchmark wrote with `--json`."""

from __future__ import annotations

import json
import statistics
from functools import cached_property
from pathlib import Path
from typing import Any

_NUM_COMMIT_DIGITS = 7


class ResultFile:
    """One file of bench/results/: where its numbers come from; of adapter-tax of 0.1.0, figures by system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def document(self) -> dict[str, Any]:
        return json.loads(self.path.read_text())

    @property
    def commit(self) -> str:
        """Shortened; `+changes` stays."""
        commit, plus, changes = self.document["commit"].partition("+")
        return commit[:_NUM_COMMIT_DIGITS] + plus + changes

    @property
    def machine(self) -> str:
        hardware = self.document["hardware"]
        cores = f"{hardware['cores']} CPU cores"
        return cores if hardware["gpu"] == "none used" else f"{hardware['gpu']}, {cores}"

    # ---- adapter-tax of 0.1.0 ---------------------------------------------------------------------------------------

    def rate(self, system: str, adapters: int) -> float | None:
        """Requests/s, the median of the repeats; None where it was not measured."""
        rows = self.document["rows"]
        return next((row["requests_per_s"] for row in rows if _is_of(row, system, adapters)), None)

    def latency_s(self, system: str, adapters: int) -> float | None:
        """The median request's, the median of the repeats; None where it was not measured."""
        values = [row["median_latency_s"] for row in self.document["repeats"] if _is_of(row, system, adapters)]
        return statistics.median(values) if values else None


def _is_of(row: dict[str, Any], system: str, adapters: int) -> bool:
    return (row["system"], row["adapters"]) == (system, adapters)
