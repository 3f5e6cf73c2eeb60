"""The results of a matrix: figures of each system in each cell, ratios to the others, and the results file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.load.compare import Figure, Ratio, figures_of, ratios_of
from bench.load.record import Record
from bench.matrix.options import Options
from bench.matrix.plan import Cell

FORMAT = "prelude-bench-matrix/1"
THROUGHPUT = "answered"  # the figure's name


@dataclass(frozen=True, slots=True)
class Measured:
    """One load on one system."""

    cell: str
    system: str
    repeat: int
    records: tuple[Record, ...]
    document: dict[str, Any]  # as `prelude bench load --json` writes it
    foreign_cores: float  # that other processes kept busy meanwhile


@dataclass(frozen=True, slots=True)
class Compared:
    """One cell: every system's figures over its repeats, and their ratios to the first system that is there."""

    cell: str
    figures: dict[str, list[Figure]]
    to: str
    ratios: dict[str, list[Ratio]]

    def value(self, system: str, name: str) -> Figure | None:
        """A system's figure by name; None where it has none."""
        return next((each for each in self.figures.get(system, ()) if each.name == name), None)


def compared(
    measured: Sequence[Measured], systems: Sequence[str], slo_ms: dict[str, float], to: str = "stock", seed: int = 1
) -> Compared:
    """The loads of one cell. Ratios are to the system `to`, or the first one if that was not measured."""
    by_system: dict[str, list[Measured]] = defaultdict(list)
    for each in measured:
        by_system[each.system].append(each)
    figures = {
        name: figures_of(
            [load.records for load in sorted(by_system[name], key=lambda one: one.repeat)], slo_ms, seed + number
        )
        for number, name in enumerate(systems)
        if name in by_system
    }
    to = to if to in figures else next(iter(figures))
    ratios = {name: ratios_of(figures[to], of) for name, of in figures.items() if name != to}
    return Compared(measured[0].cell, figures, to, ratios)


@dataclass(frozen=True, slots=True)
class Evenness:
    """The throughput of one system over the numbers of adapters of one workload."""

    workload: str
    system: str
    worst: tuple[int, float]  # number of adapters, requests/s
    best: tuple[int, float]

    @property
    def share(self) -> float:
        """Of the best that the worst reaches: 1 is flat."""
        return self.worst[1] / self.best[1] if self.best[1] else 0.0


def evenness(cells: Sequence[Cell], found: Sequence[Compared], systems: Sequence[str]) -> list[Evenness]:
    """Where a workload was run with several numbers of adapters."""
    by_name = {each.cell: each for each in found}
    counts: dict[str, list[tuple[int, Compared]]] = defaultdict(list)
    for cell in cells:
        if cell.name in by_name:
            counts[cell.workload.name].append((cell.num_adapters, by_name[cell.name]))
    rows = []
    for workload, points in counts.items():
        if len(points) < 2:
            continue
        for system in systems:
            rates = [(count, figure.value) for count, one in points if (figure := one.value(system, THROUGHPUT))]
            if len(rates) > 1:
                rates.sort(key=lambda each: each[1])
                rows.append(Evenness(workload, system, rates[0], rates[-1]))
    return rows


def document(
    facts: dict[str, Any], options: Options, measured: Sequence[Measured], found: Sequence[Compared]
) -> dict[str, Any]:
    """The content of `--json`: a summary of every load, figures with intervals, ratios. docs/benchmarks.md has it."""
    return {
        "format": FORMAT,
        **facts,
        "figures": [
            {"cell": one.cell, "system": name, "name": each.name, "unit": each.unit, "value": _rounded(each.value),
             "low": _rounded(each.interval[0]), "high": _rounded(each.interval[1])}
            for one in found
            for name, figures in one.figures.items()
            for each in figures
        ],
        "ratios": [
            {"cell": one.cell, "system": name, "to": one.to, "name": each.name, "ratio": _rounded(each.ratio),
             "low": _rounded(each.low), "high": _rounded(each.high)}
            for one in found
            for name, ratios in one.ratios.items()
            for each in ratios
        ],
        "evenness": [
            {"workload": each.workload, "system": each.system, "worst_over_best": _rounded(each.share),
             "worst_at": each.worst[0], "best_at": each.best[0]}
            for each in evenness(options.cells, found, options.systems)
        ],
        "loads": [
            {
                "cell": each.cell,
                "system": each.system,
                "repeat": each.repeat,
                "foreign_cores": round(each.foreign_cores, 2),
                **{name: each.document[name] for name in ("settings", "workload", "generator", "summary")},
            }
            for each in measured
        ],
    }  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
