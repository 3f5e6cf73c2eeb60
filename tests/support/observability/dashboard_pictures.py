"""Draws dashboards from the data of a Prometheus, in rough likeness of Grafana. Grafana itself draws nothing here."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from support.observability.dashboards import runnable
from support.observability.prometheus import Prometheus

_UNITS = {"percentunit": ("%", 100.0), "s": ("s", 1.0), "ms": ("ms", 1.0), "bytes": ("MiB", 1 / 2**20)}
_MAX_LEGEND = 8


def draw(
    dashboard: dict[str, Any],
    prometheus: Prometheus,
    path: Path,
    *,
    start: float,
    end: float,
    step_s: float,
    window: str,
) -> None:
    """Write one picture with all panels, from the data between two times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = math.ceil(len(dashboard["panels"]) / 3)
    figure, axes = plt.subplots(rows, 3, figsize=(15, 2.6 * rows), squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, dashboard["panels"], strict=False):
        axis.set_visible(True)
        found = []
        for query in panel["targets"]:
            answer = prometheus.query_range(runnable(query["expr"], window), start, end, step_s)
            found += [(_legend(query["legendFormat"], each["metric"]), each["values"]) for each in answer]
        _draw_panel(axis, panel, found, start)
    figure.suptitle(dashboard["title"], x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.tight_layout(rect=(0, 0, 1, 0.985))
    figure.savefig(path, dpi=72)
    plt.close(figure)


def _draw_panel(axis: Any, panel: dict[str, Any], found: list[tuple[str, list[Any]]], start: float) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    unit, limits = defaults["unit"], [step["value"] for step in defaults["thresholds"]["steps"][1:]]
    suffix, factor = _UNITS.get(unit, (unit.removeprefix("suffix:").strip(), 1.0))
    axis.set_title(panel["title"], loc="left", fontsize=9)
    axis.set_ylabel({"none": "", "short": ""}.get(suffix, suffix), fontsize=7)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.25)
    series = [
        (label, [float(at) - start for at, _ in values], [float(value) * factor for _, value in values])
        for label, values in found
    ]
    if panel["type"] == "stat" and series:
        last = next((y for y in reversed(series[0][2]) if math.isfinite(y)), math.nan)
        axis.text(0.5, 0.5, f"{last:.3g} {suffix if suffix not in ('none', 'short') else ''}", fontsize=22, ha="center")
        axis.set_axis_off()
        return
    if defaults.get("custom", {}).get("fillOpacity") and series:
        times = sorted({at for _, xs, _ in series for at in xs})
        by_time = [dict(zip(xs, ys, strict=True)) for _, xs, ys in series]
        heights = [[y if math.isfinite(y := each.get(at, 0.0)) else 0.0 for at in times] for each in by_time]
        axis.stackplot(times, *heights, labels=[label for label, _, _ in series], alpha=0.6)
    else:
        for label, xs, ys in series:
            axis.plot(xs, ys, linewidth=1, label=label)
    for limit in limits:
        axis.axhline(limit * factor, color="red", linestyle="--", linewidth=0.8)
    axis.set_ylim(bottom=0)
    if series:
        axis.legend(fontsize=6, loc="upper left", ncols=2 if len(series) > 4 else 1, framealpha=0.5)
        if len(series) > _MAX_LEGEND:
            axis.legend_.remove()
    else:
        axis.text(0.5, 0.5, "no data", ha="center", transform=axis.transAxes, fontsize=8, color="gray")


def _legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), template)
