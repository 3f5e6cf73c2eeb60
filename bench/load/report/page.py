"""One self-contained HTML page about a load, a sweep, or two loads beside each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

from bench.load.record import TIERS, Record
from bench.load.report.charts import Series, distribution_chart, line_chart
from bench.load.report.terminal import busy_warning
from bench.load.summary import uses

_STYLE = """
:root { color-scheme: light dark; --grid: #8884; --text: light-dark(#222, #ddd); --back: light-dark(#fff, #161616);
  --t0: light-dark(#1f6fb4, #6cb6ff); --t1: light-dark(#c2571a, #ff9d5c); --t2: light-dark(#2a8a4a, #6fd08c);
  --t3: light-dark(#8a3ab0, #cf93f0); --bad: light-dark(#b00020, #ff6b81); }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1360px;
  margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; }
td, th { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--grid); }
td:first-child, th:first-child { text-align: left; } td.text { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; } figure p { margin: 0; } svg { width: 100%; height: auto; }
polyline { fill: none; stroke-width: 1.6; } .grid { stroke: var(--grid); }
.tick, .label { font-size: 11px; fill: var(--text); }
.key { margin-right: 1rem; } .key::before { content: "\\25A0\\00A0"; }
polyline.t0 { stroke: var(--t0); } polyline.t1 { stroke: var(--t1); } polyline.t2 { stroke: var(--t2); }
polyline.t3 { stroke: var(--t3); } rect.t0 { fill: var(--t0); } rect.t1 { fill: var(--t1); }
.key.t0::before { color: var(--t0); } .key.t1::before { color: var(--t1); } .key.t2::before { color: var(--t2); }
.key.t3::before { color: var(--t3); }
.bad { border: 2px solid var(--bad); padding: .6rem 1rem; } .facts { overflow-wrap: anywhere; }
"""
_LATENCIES = (
    ("TTFT, ms", "ttft_ms"),
    ("ITL, ms", "itl_ms"),
    ("TPOT, ms", "tpot_ms"),
    ("end to end, ms", "e2e_ms"),
    ("encode per token, ms", "encode_ms_per_token"),
    ("decode per token, ms", "decode_ms_per_token"),
    ("sent late by, ms", "send_lag_ms"),
)
_COLUMNS = ("mean", "p50", "p90", "p99", "max")
_USES = {"base": "base model", "first": "first request for its adapter", "later": "adapter used before"}


def load_page(found: dict[str, Any], records: Sequence[Record]) -> str:
    """The report of one load."""
    summary = found["summary"]
    good = [each for each in records if each.error is None]
    body = [
        f"<h1>{escape(found['workload']['name'])}: {summary['num_good']} of {summary['num_requests']} requests</h1>",
        _errors(summary),
        _busy(found.get("generator", {})),
        _facts(found),
        "<h2>Figures</h2>",
        _rates(summary),
        table_of(("", *_COLUMNS), [(name, *_cells(summary[key])) for name, key in _LATENCIES if summary[key]]),
        "<h2>Over time</h2>",
        section(_over_time(summary["windows"])),
        "<h2>Distributions</h2>",
        section(
            [
                distribution_chart("Time to the first token", "ms", [("TTFT", _ms(each.ttft_s for each in good))]),
                distribution_chart(
                    "Between two tokens", "ms", [("ITL", _ms(gap for each in good for gap in each.itl_s))]
                ),
                distribution_chart("End to end", "ms", [("end to end", _ms(each.e2e_s for each in good))]),
                distribution_chart("TTFT by use of the adapter", "ms", _by_use(records)),
            ]
        ),
        "<h2>By use of the adapter</h2>",
        "<p>The first request of this load for an adapter may have to load it.</p>",
        _groups({_USES[name]: group for name, group in summary["by_use"].items()}),
        *_residency(summary.get("by_residency")),
    ]
    return page(found["workload"]["name"], body)


def page(title: str, body: Sequence[str]) -> str:
    """A whole HTML document; nothing in it is loaded from elsewhere."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _errors(summary: dict[str, Any]) -> str:
    if not summary["num_failed"]:
        return ""
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary["errors"]["by_kind"].items())
    rows = [
        (each["kind"], _text(each["status"]), each["detail"], each["count"])
        for each in summary["errors"]["most_frequent"]
    ]
    text = f"{summary['num_failed']} of {summary['num_requests']} requests failed: {kinds}. They are in no latency."
    return f'<div class="bad"><p>{escape(text)}</p>{table_of(("kind", "status", "said", "count"), rows)}</div>'


def _busy(generator: dict[str, Any]) -> str:
    warning = busy_warning({"cpu_share": 0.0, **generator})  # older files do not have it
    return f'<p class="bad">{escape(warning.strip())}</p>' if warning else ""


def _facts(found: dict[str, Any]) -> str:
    workload, settings, hardware = found["workload"], found["settings"], found["hardware"]
    lines = [
        f"{workload['text']} Source: {workload['source']}",
        f"{settings['url']}, model {settings['model']}, {settings['num_adapters']} adapters, {_pace(settings)}, "
        f"seed {settings['seed']}, SHA-256 of the first {workload['num_digested']} requests {workload['sha256']}",
        f"{found['command']}",
        f"generated on {hardware['cpu']}, {hardware['cores']} cores, commit {found['commit']}",
    ]
    return "".join(f'<p class="facts">{escape(line)}</p>' for line in lines)


def _pace(settings: dict[str, Any]) -> str:
    if settings["arrivals"] == "closed loop":
        return f"{settings['concurrency']} at a time"
    return f"{settings['requests_per_s']:g} requests/s ({settings['arrivals']})"


def _rates(summary: dict[str, Any]) -> str:
    rows = [
        ("duration, s", f"{summary['duration_s']:.1f}"),
        ("requests/s", f"{summary['requests_per_s']:.2f}"),
        ("output tokens/s", f"{summary['output_tokens_per_s']:.0f}"),
        ("tokens/s with prompts", f"{summary['total_tokens_per_s']:.0f}"),
        ("answers shorter than asked for", summary["num_short"]),
    ]
    if summary["goodput"] is not None:
        limits = ", ".join(f"{key} {limit:g} ms" for key, limit in summary["slo_ms"].items())
        goodput = summary["goodput"]
        rows.append((f"goodput ({limits})", f"{goodput['requests_per_s']:.2f}/s, {goodput['share']:.1%} of all"))
    return table_of(("", ""), rows)


def _over_time(windows: Sequence[dict[str, Any]]) -> list[str]:
    def points(value: Any) -> list[tuple[float, float]]:
        return [(each["at_s"], value(each)) for each in windows if value(each) is not None]

    return [
        line_chart(
            "Requests per second",
            "s",
            "requests/s",
            [
                Series("answered", points(lambda each: each["num_good"] / each["length_s"])),
                Series("failed", points(lambda each: each["num_failed"] / each["length_s"]), 1),
            ],
        ),
        line_chart(
            "Events with tokens per second",
            "s",
            "events/s",
            [Series("events", points(lambda each: each["num_token_events"] / each["length_s"]))],
        ),
        line_chart(
            "Time to the first token",
            "s",
            "ms",
            [
                Series("p50", points(lambda each: each["ttft_ms_p50"])),
                Series("p99", points(lambda each: each["ttft_ms_p99"]), 1),
            ],
        ),
    ]


def _by_use(records: Sequence[Record]) -> list[tuple[str, list[float]]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for record, use in zip(records, uses(records), strict=True):
        if record.error is None:
            groups[_USES[use]].append(1000 * record.ttft_s)
    return sorted(groups.items())


def _residency(groups: dict[str, Any] | None) -> list[str]:
    """Nothing if the server does not say where adapters were."""
    if not groups:
        return []
    text = "<p>Where adapters were, as the server says: in host memory, on the worker's disk or in the store.</p>"
    return [
        "<h2>By residency of the adapter</h2>",
        text,
        _groups({tier: groups[tier] for tier in TIERS if tier in groups}),
    ]


def _groups(groups: dict[str, Any]) -> str:
    head = ("", "requests", "failed", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "end to end p50, ms")
    rows = [
        (
            name,
            group["num_requests"],
            group["num_failed"],
            _figure(group["ttft_ms"], "p50"),
            _figure(group["ttft_ms"], "p99"),
            _figure(group["tpot_ms"], "p50"),
            _figure(group["e2e_ms"], "p50"),
        )
        for name, group in groups.items()
    ]
    return table_of(head, rows)


def section(charts: Sequence[str]) -> str:
    """Charts beside each other."""
    return f'<div class="charts">{"".join(charts)}</div>'


def table_of(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A table. Every cell is escaped."""
    titles = "".join(f"<th>{escape(each)}</th>" for each in head) if any(head) else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><tr>{titles}</tr>{body}</table>"


def _cells(figures: dict[str, float]) -> list[str]:
    return [f"{figures[column]:.2f}" for column in _COLUMNS]


def _figure(figures: dict[str, float] | None, column: str) -> str:
    return "-" if figures is None else f"{figures[column]:.2f}"


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _ms(seconds: Any) -> list[float]:
    return [1000 * each for each in seconds]
