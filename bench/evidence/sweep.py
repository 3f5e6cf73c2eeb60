"""The README's table and plot of requests/s over the number of adapters on a CPU, which `make bench` measures."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean, median
from typing import Any

from bench.evidence.cells import markdown, result
from bench.load.report.charts import line_image
from bench.matrix.report import lines_over_adapters, rates_over_adapters, with_interval

_SWEEP = result("matrix-sweep-cpu.json")
_REPEATS = tuple(result(f"matrix-sweep-repeats-cpu{name}.json") for name in ("", "-again"))
_NAMES = {"none": "no adapters", "unified": "Prelude, unified worker", "stock": "stock SGLang multi-LoRA"}


def table() -> str:
    rates = _rates()
    counts = sorted(set().union(*rates.values()))
    rows = [(name, *(with_interval(figures[count], "value") for count in counts)) for name, figures in rates.items()]
    head = ("requests/s", *(f"n = {count}" if count == counts[0] else str(count) for count in counts))
    settings = _SWEEP.document["settings"]
    source = (
        f"A small model, LoRA of rank {settings['lora_rank']}, {settings['slots']} slots; {_SWEEP.machine}, commit "
        f"`{_SWEEP.commit}`. In brackets, 95 % intervals of what varies within loads, not between repeats (a bootstrap "
        "over their seconds)."
    )
    return "\n".join((markdown(head, rows), "", source))


def plot() -> str:
    """An SVG file."""
    lines = lines_over_adapters(_rates())
    return line_image("Requests/s over the number of adapters", "adapters in use", "requests/s", lines, log_x=True)


def medians() -> dict[str, dict[int, float]]:
    """Of the repeats of two runs: requests/s of each system by the number of adapters."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for file in _REPEATS:
        for load in file.document["loads"]:
            rates = found[load["system"]][load["settings"]["num_adapters"]]
            rates.append(load["summary"]["requests_per_s"])
    return {system: {count: median(rates) for count, rates in counts.items()} for system, counts in found.items()}


def repeats() -> str:
    """The same sweep with more repeats, and how even it is."""
    found = medians()
    counts = sorted(found["none"])
    num_slots = _REPEATS[0].document["settings"]["slots"]
    num_repeats = sum(file.document["settings"]["repeats"] for file in _REPEATS)
    head = (f"medians of {num_repeats}, requests/s", *(f"n = {count}" for count in counts))
    rows = []
    for system, rates in found.items():
        beyond = fmean(rate for count, rate in rates.items() if count > num_slots)
        within = fmean(rate for count, rate in rates.items() if count <= num_slots)
        even = min(rates.values()) / max(rates.values())
        rows.append([system, *(f"{rates[count]:.1f}" for count in counts), f"{even:.2f}", f"{beyond / within:.2f}"])
    table = markdown((*head, "slowest / fastest n", f"more than {num_slots} / at most"), rows)
    sources = ", ".join(f"commit `{file.commit}`" for file in _REPEATS)
    return f"{table}\n\n{_REPEATS[0].machine}, {sources}."


def _rates() -> dict[str, dict[int, dict[str, Any]]]:
    """Figures of each system by the number of adapters; systems by the names that readers know."""
    (found,) = rates_over_adapters(_SWEEP.document).values()
    return {text: found[name] for name, text in _NAMES.items()}
