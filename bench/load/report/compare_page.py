"""Pages of two loads beside each other, and of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from bench.load.record import Record
from bench.load.report.charts import Series, distribution_chart, line_chart
from bench.load.report.compare import CONFIDENCE, Ratio
from bench.load.report.page import page, section, table_of
from bench.load.sweep import Found

_SIDES = ("A", "B")


def compare_page(
    names: tuple[str, str],
    records: tuple[Sequence[Record], Sequence[Record]],
    ratios: Sequence[Ratio],
    notes: Sequence[str],
) -> str:
    """Ratios with their intervals, distributions of both, and what makes them hard to compare."""
    good = [[each for each in side if each.error is None] for side in records]
    title = f"{names[0]} and {names[1]}"
    table = table_of(
        ("", "unit", "A", "B", "B / A", f"{CONFIDENCE:.0%} interval", ""),
        [
            (
                each.name,
                each.unit,
                f"{each.a:.3f}",
                f"{each.b:.3f}",
                f"{each.ratio:.3f}",
                each.interval,
                "1 is in it" if each.has_one else "",
            )
            for each in ratios
        ],
    )
    ttft = [(side, [1000 * each.ttft_s for each in found]) for side, found in zip(_SIDES, good, strict=True)]
    gaps = [
        (side, [1000 * gap for each in found for gap in each.itl_s]) for side, found in zip(_SIDES, good, strict=True)
    ]
    whole = [(side, [1000 * each.e2e_s for each in found]) for side, found in zip(_SIDES, good, strict=True)]
    body = [
        f"<h1>A: {escape(names[0])}<br>B: {escape(names[1])}</h1>",
        *(f'<p class="facts">{escape(note)}</p>' for note in notes),
        "<h2>Ratios</h2>",
        table,
        "<h2>Distributions</h2>",
        section(
            [
                distribution_chart("Time to the first token", "ms", ttft),
                distribution_chart("Between two tokens", "ms", gaps),
                distribution_chart("End to end", "ms", whole),
            ]
        ),
    ]
    return page(title, body)


def sweep_page(document: dict[str, Any], found: Found) -> str:
    """Latencies and the share of requests within the objectives, over the rates that were tried."""
    probes = sorted(found.probes, key=lambda each: each.rate)

    def curve(name: str, key: str, column: str, tone: int) -> Series:
        points = [(each.rate, each.summary[key][column]) for each in probes if each.summary[key]]
        return Series(name, points, tone)

    body = [
        f"<h1>{escape(document['workload']['name'])}: {escape(verdict(found))}</h1>",
        f'<p class="facts">{escape(document["command"])}</p>',
        section(
            [
                line_chart(
                    "Requests within every objective",
                    "requests/s",
                    "share",
                    [Series("share", [(each.rate, each.share) for each in probes])],
                    log_x=True,
                ),
                line_chart(
                    "Time to the first token",
                    "requests/s",
                    "ms",
                    [curve("p50", "ttft_ms", "p50", 0), curve("p99", "ttft_ms", "p99", 1)],
                    log_x=True,
                ),
                line_chart(
                    "Time per output token",
                    "requests/s",
                    "ms",
                    [curve("p50", "tpot_ms", "p50", 0), curve("p99", "tpot_ms", "p99", 1)],
                    log_x=True,
                ),
            ]
        ),
        table_of(
            ("rate", "within objectives", "failed", "answered/s", "output tokens/s", "TTFT p99, ms"),
            [
                (
                    f"{each.rate:g}",
                    f"{each.share:.1%}",
                    each.summary["num_failed"],
                    f"{each.summary['requests_per_s']:.2f}",
                    f"{each.summary['output_tokens_per_s']:.0f}",
                    "-" if each.summary["ttft_ms"] is None else f"{each.summary['ttft_ms']['p99']:.1f}",
                )
                for each in probes
            ],
        ),
    ]
    return page(f"sweep of {document['workload']['name']}", body)


def verdict(found: Found) -> str:
    """The result in a sentence, and where the best rate was not reached, that."""
    best = found.best_probe
    if best is None or not best.is_short:
        return _outcome(found)
    return (
        f"{_outcome(found)}; but {best.came_per_s:.4g} came per second, since conversations that began late were not "
        "over: give a longer --duration-s"
    )


def _outcome(found: Found) -> str:
    if found.ended:
        known = "none is known to hold" if found.best is None else f"{found.best:.4g} requests/s held the objectives"
        return f"{known}; the search ended early: {found.ended}"
    if found.best is None:
        lowest = min(each.rate for each in found.probes)
        return f"no rate held the objectives; the lowest tried was {lowest:g} requests/s"
    if not found.is_bounded:
        return f"at least {found.best:.4g} requests/s hold the objectives; no rate above was tried"
    return f"{found.best:.4g} requests/s hold the objectives"
