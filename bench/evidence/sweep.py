"""The README's table and plot of requests/s over the number of adapters on a CPU, which `make bench` measures."""

from __future__ import annotations

from bench.evidence.cells import markdown, result
from bench.load.report.charts import Series, line_image
from bench.matrix.report import rates_over_adapters

_SWEEP = result("matrix-sweep-cpu.json")
_NAMES = {
    "none": "no adapters",
    "unified": "Prelude, unified worker",
    "pair": "Prelude, pair",
    "stock": "stock SGLang multi-LoRA",
}


def table() -> str:
    rates = rates_over_adapters(_SWEEP.document)
    shown = [name for name in _NAMES if name in rates]
    counts = sorted({count for each in rates.values() for count in each})
    rows = [(_NAMES[name], *(rates[name][count][1] for count in counts)) for name in shown]
    head = ("requests/s", *(f"n = {count}" if count == counts[0] else str(count) for count in counts))
    settings = _SWEEP.document["settings"]
    source = (
        f"A small model, LoRA of rank {settings['lora_rank']}, {settings['slots']} slots; {_SWEEP.machine}, commit "
        f"`{_SWEEP.commit}`. In brackets, 95 % intervals of what varies within loads."
    )
    return "\n".join((markdown(head, rows), "", source))


def plot() -> str:
    """An SVG file."""
    rates = rates_over_adapters(_SWEEP.document)
    shown = [name for name in _NAMES if name in rates]
    series = [
        Series(_NAMES[name], sorted((count, value) for count, (value, _) in rates[name].items()), tone)
        for tone, name in enumerate(shown)
    ]
    return line_image("Requests/s over the number of adapters", "adapters in use", "requests/s", series, log_x=True)
