"""Plots of the answers: SVG files, the same bytes for the same figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.simulator.questions.options import Row

_METADATA = {"Date": None, "Creator": None}


def draw_all(document: dict[str, Any], folder: Path) -> list[Path]:
    """One file for each answer that has a plot."""
    return [
        _draw(folder / f"simulate-{name}.svg", draw, document["answers"][name])
        for name, draw in PLOTS.items()
        if document["answers"].get(name)
    ]


def redraw(json_path: Path, folder: Path) -> list[Path]:
    """From a file that was written before."""
    return draw_all(json.loads(json_path.read_text()), folder)


def _draw(path: Path, draw: Callable[[Any, list[Row]], None], rows: list[Row]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "prelude", "font.size": 8, "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(8, 3.4), layout="constrained")
    try:
        draw(figure, rows)
        figure.savefig(path, metadata=_METADATA)
    finally:
        plt.close(figure)
    return path


def _rack(figure: Any, rows: list[Row]) -> None:
    axes, loads = figure.subplots(1, 2)
    for row in rows:
        back = "gone" if row["back_after_s"] is None else f"back after {row['back_after_s']:.0f} s"
        steps = row["over_time"]
        times = [step["at_s"] for step in steps]
        axes.plot(times, [max(1.0, step["ttft_ms_p99"]) for step in steps], label=f"{row['pools']}, {back}", lw=1)
        loads.plot(times, [step["cold_loads"] for step in steps], lw=1)
    axes.set_yscale("log")
    axes.set_ylabel("p99 TTFT, ms, by time of arrival")
    loads.set_ylabel("cold loads in 2 s")
    axes.set_xlabel("seconds")
    loads.set_xlabel("seconds")
    axes.legend(fontsize=6)


def _ratios(figure: Any, rows: list[Row]) -> None:
    shapes = list(dict.fromkeys((row["prompt_tokens"], row["output_tokens"]) for row in rows))
    for shape, axes in zip(shapes, figure.subplots(1, len(shapes), squeeze=False)[0], strict=True):
        of_shape = [row for row in rows if (row["prompt_tokens"], row["output_tokens"]) == shape]
        pools = list(dict.fromkeys(row["pools"] for row in of_shape))
        for tpot_ms in dict.fromkeys(row["tpot_ms"] for row in of_shape):
            rates = {row["pools"]: row["requests_per_s"] for row in of_shape if row["tpot_ms"] == tpot_ms}
            axes.plot(
                range(len(pools)), [rates[name] for name in pools], marker="o", ms=3, label=f"TPOT {tpot_ms:g} ms"
            )
        axes.set_xticks(range(len(pools)), [_short(name) for name in pools], rotation=60, fontsize=6)
        axes.set_title(f"{shape[0]} + {shape[1]} tokens")
        axes.set_ylabel("highest rate, requests/s")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=6)


def _short(pools: str) -> str:
    return pools.replace(" prefill", "P").replace(" decode", "D").replace(" unified", "U").replace(" + ", " ")


def _roles(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    for row in rows:
        steps = row["over_time"]
        axes.plot([step["at_s"] for step in steps], [step["good_share"] for step in steps], label=row["layout"], lw=1)
    axes.set_xlabel("seconds; long prompts, long answers, long prompts")
    axes.set_ylabel("share of the requests within both objectives")
    axes.legend(fontsize=6)


def _slots(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    axes.plot([str(row["slots"]) for row in rows], [row["ttft_ms_p95"] for row in rows], marker="o")
    axes.set_xlabel("slots")
    axes.set_ylabel("p95 TTFT, ms")
    axes.set_yscale("log")


PLOTS: dict[str, Callable[[Any, list[Row]], None]] = {
    "rack": _rack,
    "ratios": _ratios,
    "roles": _roles,
    "slots": _slots,
}
