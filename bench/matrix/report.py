"""The report of a matrix in Markdown, made from its results file."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.matrix.results import THROUGHPUT
from bench.measuring.contention import QUIET_CORES

_HEAD = ("system", "requests/s", "/ {to}", "goodput/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "failed")
_EVEN_HEAD = ("workload", "system", "slowest n / fastest n", "slowest at n", "fastest at n")
_EVEN_KEYS = ("workload", "system", "worst_over_best", "worst_at", "best_at")
_FEW_REQUESTS = 30  # in a load
_BUSY_SHARE = 0.7  # of one core, per process of the load generator


def markdown(found: dict[str, Any]) -> str:
    """Tables with the conditions under them."""
    parts = []
    for cell in dict.fromkeys(each["cell"] for each in found["figures"]):
        to = next((each["to"] for each in found["ratios"] if each["cell"] == cell), "")
        parts += [f"**{cell}**", "", _table([each.format(to=to) for each in _HEAD], _rows(found, cell)), ""]
    if found["evenness"]:
        rows = [[str(each[key]) for key in _EVEN_KEYS] for each in found["evenness"]]
        parts += [_table(_EVEN_HEAD, rows), ""]
    return "\n".join([*parts, *(f"- {each}" for each in notes(found))])


def _rows(found: dict[str, Any], cell: str) -> list[list[str]]:
    figures = {(each["system"], each["name"]): each for each in found["figures"] if each["cell"] == cell}
    ratios = {each["system"]: each for each in found["ratios"] if (each["cell"], each["name"]) == (cell, THROUGHPUT)}
    rows = []
    for system in dict.fromkeys(system for system, _ in figures):
        loads = [each["summary"] for each in found["loads"] if (each["cell"], each["system"]) == (cell, system)]
        share = sum(each["goodput"]["share"] for each in loads) / len(loads)
        latencies = (figures.get((system, name)) for name in ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"))
        rows.append(
            [
                system,
                _with_range(figures[system, THROUGHPUT], "value"),
                _with_range(ratios[system], "ratio") if system in ratios else "",
                f"{_number(figures[system, 'goodput']['value'])} ({share:.0%})",
                *("" if each is None else f"{_number(each['value'])} ms" for each in latencies),
                f"{sum(each['num_failed'] for each in loads)} of {sum(each['num_requests'] for each in loads)}",
            ]
        )
    return rows


def notes(found: dict[str, Any]) -> list[str]:
    """What makes the numbers doubtful."""
    loads = found["loads"]
    limits = ", ".join(f"{key.upper()} {limit:g} ms" for key, limit in found["settings"]["slo_ms"].items())
    lines = [f"means over the repeats, in brackets the least and the most of one; goodput: within {limits}"]
    few = Counter(each["cell"] for each in loads if each["summary"]["num_requests"] < _FEW_REQUESTS)
    if few:
        cells = "; ".join(f"{cell} ({count})" for cell, count in few.items())
        lines.append(
            f"FEW: less than {_FEW_REQUESTS} requests in loads of {cells}, so percentiles say little there; a longer "
            "--duration-s has more"
        )
    noisy = [each["foreign_cores"] for each in loads if each["foreign_cores"] > QUIET_CORES]
    if noisy:
        lines.append(
            f"NOT QUIET: during {len(noisy)} of {len(loads)} loads other processes kept more than "
            f"{QUIET_CORES} cores busy (at most {max(noisy):.1f}); run it again on a quiet machine"
        )
    busy = [each["generator"]["cpu_share"] for each in loads if each["generator"]["cpu_share"] > _BUSY_SHARE]
    if busy:
        lines.append(f"in {len(busy)} loads the load generator was busy for up to {max(busy):.0%} of the time")
    return lines


def _with_range(each: dict[str, Any], key: str) -> str:
    """A figure's value or ratio, with the least and the most of a repeat in brackets if they differ."""
    value, *ends = (f"{each[name]:.2f}" if key == "ratio" else _number(each[name]) for name in (key, "low", "high"))
    return value if ends == [value, value] else f"{value} [{' to '.join(ends)}]"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
