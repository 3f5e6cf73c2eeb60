"""The README's table and plot of requests/s over the number of adapters on a CPU, which `make bench` measures."""

from __future__ import annotations

from typing import Any

from bench.evidence.cells import markdown, result
from bench.load.report.charts import line_image
from bench.matrix.report import lines_over_adapters, rates_over_adapters, with_interval

_SWEEP = result("matrix-sweep-cpu.json")
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


def _rates() -> dict[str, dict[int, dict[str, Any]]]:
    """Figures of each system by the number of adapters; systems by the names that readers know."""
    (found,) = rates_over_adapters(_SWEEP.document).values()
    return {text: found[name] for name, text in _NAMES.items()}
