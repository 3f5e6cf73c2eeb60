"""The results of a matrix: figures of each system in each cell, ratios to another system, and the results file."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bench.matrix.options import Options

FORMAT = "prelude-bench-matrix/2"
THROUGHPUT = "answered"  # the figure's name
_RATES = {THROUGHPUT: "requests/s", "goodput": "requests/s", "output": "tokens/s", "prompt + output": "tokens/s"}
_LATENCIES = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "end to end": "e2e_ms"}
_QUANTILES = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Measured:
    """One load on one system."""

    cell: str
    system: str
    repeat: int
    document: dict[str, Any]  # as `prelude bench load --json` writes it
    foreign_cores: float  # that other processes kept busy meanwhile


def document(facts: dict[str, Any], options: Options, measured: Sequence[Measured]) -> dict[str, Any]:
    """The content of `--json`: a summary of every load, figures and ratios. docs/benchmarks.md has it."""
    by_cell: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for each in sorted(measured, key=lambda one: (options.systems.index(one.system), one.repeat)):
        by_cell[each.cell][each.system].append(_figures(each.document["summary"]))
    figures, ratios = [], []
    for cell, systems in by_cell.items():
        to = options.to if options.to in systems else next(iter(systems))
        for system, loads in systems.items():
            for name in loads[0]:
                values = [each[name] for each in loads if name in each]
                unit = _RATES.get(name, "ms")
                figures.append(
                    {"cell": cell, "system": system, "name": name, "unit": unit, "value": round(fmean(values), 4)}
                    | _range(values)
                )
            if system != to:
                ratios += [{"cell": cell, "system": system, "to": to, **each} for each in _ratios(loads, systems[to])]
    return {
        "format": FORMAT,
        **facts,
        "figures": figures,
        "ratios": ratios,
        "evenness": _evenness(options, figures),
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
    }


def _figures(summary: dict[str, Any]) -> dict[str, float]:
    """Of one load, by name."""
    rates = (
        summary["requests_per_s"],
        summary["goodput"]["requests_per_s"],
        summary["output_tokens_per_s"],
        summary["total_tokens_per_s"],
    )
    found = dict(zip(_RATES, rates, strict=True))
    for name, key in _LATENCIES.items():
        if summary[key] is not None:
            found |= {f"{name} {quantile}": summary[key][quantile] for quantile in _QUANTILES}
    return found


def _ratios(loads: Sequence[dict[str, float]], to: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """Of the means, with those of the loads of one repeat, which run close together."""
    found = []
    for name in loads[0]:
        pairs = [
            (own[name], base[name]) for own, base in zip(loads, to, strict=False) if base.get(name) and name in own
        ]
        if pairs:
            ratio = fmean(own for own, _ in pairs) / fmean(base for _, base in pairs)
            found.append({"name": name, "ratio": round(ratio, 4), **_range([own / base for own, base in pairs])})
    return found


def _range(values: Sequence[float]) -> dict[str, float]:
    return {"low": round(min(values), 4), "high": round(max(values), 4)}


def _evenness(options: Options, figures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each system, the slowest and the fastest number of adapters, where a workload was run with several."""
    rates = {(each["cell"], each["system"]): each["value"] for each in figures if each["name"] == THROUGHPUT}
    found = []
    for workload in dict.fromkeys(cell.name for cell in options.cells):
        counts = {cell.label: cell.num_adapters for cell in options.cells if cell.name == workload}
        for system in options.systems:
            points = sorted((rates[cell, system], count) for cell, count in counts.items() if (cell, system) in rates)
            if len(points) > 1:
                (low, worst_at), (high, best_at) = points[0], points[-1]
                share = round(low / high, 4) if high else 0.0
                found.append(
                    {"workload": workload, "system": system, "worst_over_best": share, "worst_at": worst_at,
                     "best_at": best_at}
                )  # fmt: skip
    return found
