"""The README's chart: requests/s over the number of adapters, on an H200."""

from __future__ import annotations

from prelude.bench.evidence.cells import result
from prelude.bench.load.report.charts import Series, line_image

COUNTS = (1, 32, 512)  # adapters in use
OWN = result("adapter-tax-h200-llama-3.1-8b-rank16-two-repeats.json")
STOCK = result("adapter-tax-h200-llama-3.1-8b-rank16-stock-two-repeats.json")  # with a baseline of its own

_LINES = {
    "no adapters": (OWN, "none"),
    "Prelude, LoRA": (OWN, "unified_lora"),
    "stock SGLang multi-LoRA": (STOCK, "stock"),
}


def chart() -> str:
    """An SVG file."""
    lines = [
        Series(name, [(count, file.rate(system, count) or 0.0) for count in COUNTS], tone)
        for tone, (name, (file, system)) in enumerate(_LINES.items())
    ]
    title = "Requests/s over the number of adapters, Llama-3.1-8B's sizes, one H200"
    return line_image(title, "adapters in use", "requests/s", lines, log_x=True)
