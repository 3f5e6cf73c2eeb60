"""The pages' charts, from bench/results/: `python -m bench.evidence` draws them.

Pages quote numbers, which `tests/unit/docs/test_evidence.py` compares with the files.
"""

import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
IMAGES = ROOT / "docs" / "images"

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
TURN_TPOT_MS = "20"
_TURN_TONES = {"roles that follow the load": 0, "2 prefill + 2 decode": 1, "4 unified": 2}
_PHASES, _PHASE_S = ("long prompts", "long answers", "long prompts"), 40
_TOP, _HEIGHT, _LEFT = 62, 170, 52  # of the area with the lines
_IMAGE_STYLE = (
    "text{font:15px system-ui,sans-serif;fill:#808080}.head{font-weight:600}.value{font-weight:600}"
    ".t0{fill:#3d8bd4}.t1{fill:#8a8a8a}.t2{fill:#3fa864}polyline{fill:none!important;stroke-width:3}"
    "polyline.t0{stroke:#3d8bd4}polyline.t1{stroke:#8a8a8a}polyline.t2{stroke:#3fa864}path{stroke:#80808060}"
)


def best(name: str) -> float:
    """Requests/s within a TTFT of 1 s and a TPOT of 20 ms, for 99 % of the requests."""
    asked = {"prompt_tokens": 2048, "generated_tokens": 128, "slo_ms": {"ttft": 1000.0, "tpot": 20.0}}
    rows = document(f"goodput-h200x4-{name}")["rows"]
    return next(row["best_requests_per_s"] for row in rows if row.items() >= asked.items())


def layouts() -> str:
    """A bar for each system; the colours do on light and on dark pages."""
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
    return _image(title, _HEAD + len(bars) * _BAR_STEP, "".join(parts))


def turn() -> str:
    """A line for each system: the share of the requests that met the objectives, by when they began."""
    ends_s, width = len(_PHASES) * _PHASE_S, _WIDTH - _LEFT
    parts = []
    for number, name in enumerate(_PHASES):
        left = _LEFT + number * width / len(_PHASES)
        parts.append(
            f'<path d="M{left:.1f} {_TOP}v{_HEIGHT}"/><text x="{left + 6:.1f}" y="{_TOP - 6}">{name}</text>'
            f'<text x="{left:.1f}" y="{_TOP + _HEIGHT + 18}">{number * _PHASE_S} s</text>'
        )
    for share, text in ((0, "0 %"), (1, "100 %")):
        parts.append(f'<text x="0" y="{_TOP + _HEIGHT * (1 - share) + 5:.1f}">{text}</text>')
    labels = _LEFT
    for row in document("turn-h200-quarters")["rows"]:
        points = []
        for window in row["windows"]:
            share = window["num_good"][TURN_TPOT_MS] / window["num_requests"]
            x = _LEFT + (window["from_s"] + 2.5) / ends_s * width
            points.append(f"{x:.1f},{_TOP + _HEIGHT * (1 - share):.1f}")
        name, tone = row["system"], _TURN_TONES[row["system"]]
        parts.append(
            f'<polyline class="t{tone}" points="{" ".join(points)}"/>'
            f'<text class="value t{tone}" x="{labels}" y="{_TOP + _HEIGHT + 44}">{name}</text>'
        )
        labels += 9 * len(name) + 16
    title = f"Requests within a TTFT of 2 s and {TURN_TPOT_MS} ms per token, as the load turns"
    return _image(title, _TOP + _HEIGHT + 54, "".join(parts))


def _image(title: str, height: int, content: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
        f"<title>{escape(title)}</title><style>{_IMAGE_STYLE}</style>"
        f'<text class="head" x="0" y="16">{escape(title)}</text>{content}</svg>\n'
    )


CHARTS: dict[str, Callable[[], str]] = {"layouts-h200x4.svg": layouts, "turn-h200-quarters.svg": turn}


def document(name: str) -> dict[str, Any]:
    """A file of bench/results/."""
    return json.loads((RESULTS / f"{name}.json").read_text())


if __name__ == "__main__":
    for name, chart in CHARTS.items():
        (IMAGES / name).write_text(chart())
