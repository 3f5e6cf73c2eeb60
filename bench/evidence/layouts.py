"""The README's chart: requests/s within the objectives on four GPUs, systems side by side."""

from __future__ import annotations

from bench.evidence.cells import result
from bench.load.report.charts import bar_image

SYSTEMS = {  # the results' names, by the file's: what runs, and the bar's tone
    "prelude-3p1d": ("Prelude, 3 prefill workers with adapters + 1 decode worker without", 0),
    "none-3p1d": ("no adapters: stock SGLang, 3 prefill + 1 decode engine", 1),
    "prelude-4u": ("Prelude, 4 unified workers", 0),
    "stock-4u": ("stock SGLang's multi-LoRA, 4 engines", 2),
}


def best(name: str) -> float:
    """Requests/s within a TTFT of 1 s and a TPOT of 20 ms, for 99 % of the requests."""
    rows = result(f"goodput-h200x4-{name}.json").document["rows"]
    return next(row["best_requests_per_s"] for row in rows if row["slo_ms"] == {"ttft": 1000.0, "tpot": 20.0})


def chart() -> str:
    """An SVG file."""
    bars = [(text, best(name), tone) for name, (text, tone) in SYSTEMS.items()]
    return bar_image("Requests/s on four H200 with tokens at most 20 ms apart", bars)
