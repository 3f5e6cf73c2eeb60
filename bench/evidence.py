"""The README's chart, from bench/results/: `python -m bench.evidence` draws it.

Pages quote numbers, which `tests/unit/docs/test_evidence.py` compares with the files.
"""

import json
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
IMAGE = ROOT / "docs" / "images" / "layouts-h200x4.svg"

SYSTEMS = {  # the results' names, by the file's: what runs, and the bar's tone
    "prelude-3p1d": ("Prelude, 3 prefill workers with adapters + 1 decode worker without", 0),
    "none-3p1d": ("no adapters: stock SGLang, 3 prefill + 1 decode engine", 1),
    "prelude-4u": ("Prelude, 4 unified workers", 0),
    "stock-3p1d": ("stock SGLang's prefill/decode, LoRA on both sides, 3 + 1", 2),
    "stock-4u": ("stock SGLang's multi-LoRA, 4 engines", 2),
}
_WIDTH = 640
_HEAD = 30
_BAR_STEP = 52
_VALUE_WIDTH = 60
_IMAGE_STYLE = (
    "text{font:15px system-ui,sans-serif;fill:#808080}.head{font-weight:600}.value{font-weight:600}"
    "rect.t0{fill:#3d8bd4}rect.t1{fill:#8a8a8a}rect.t2{fill:#3fa864}"
)


def best(name: str) -> float:
    """Requests/s within a TTFT of 1 s and a TPOT of 20 ms, for 99 % of the requests."""
    asked = {"prompt_tokens": 2048, "generated_tokens": 128, "slo_ms": {"ttft": 1000.0, "tpot": 20.0}}
    rows = document(f"goodput-h200x4-{name}")["rows"]
    return next(row["best_requests_per_s"] for row in rows if row.items() >= asked.items())


def chart() -> str:
    """An SVG file, a bar for each system; its colours do on light and on dark pages."""
    title, bars = "Requests/s on four H200 with tokens at most 20 ms apart", {name: best(name) for name in SYSTEMS}
    parts = []
    for number, (name, value) in enumerate(bars.items()):
        top, (text, tone) = _HEAD + number * _BAR_STEP, SYSTEMS[name]
        length = value / max(bars.values()) * (_WIDTH - _VALUE_WIDTH)
        parts.append(
            f'<text x="0" y="{top + 16}">{escape(text)}</text>'
            f'<rect class="t{tone}" x="0" y="{top + 23}" width="{length:.1f}" height="18" rx="2"/>'
            f'<text class="value" x="{length + 8:.1f}" y="{top + 38}">{value:.1f}</text>'
        )
    box = f"0 0 {_WIDTH} {_HEAD + len(bars) * _BAR_STEP}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img"><title>{escape(title)}</title>'
        f'<style>{_IMAGE_STYLE}</style><text class="head" x="0" y="16">{escape(title)}</text>{"".join(parts)}</svg>\n'
    )


def document(name: str) -> dict[str, Any]:
    """A file of bench/results/."""
    return json.loads((RESULTS / f"{name}.json").read_text())


if __name__ == "__main__":
    IMAGE.write_text(chart())
