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
_COLOURS = ("#3d8bd4", "#8a8a8a", "#3fa864")  # by tone; they do on light and on dark pages
_TURN_TONES = {"roles that follow the load": 0, "2 prefill + 2 decode": 1, "4 unified": 2}
_PHASES = ("long prompts", "long answers", "long prompts")  # all as long
_TOP, _HEIGHT, _LEFT = 62, 170, 52  # of the area with the lines
_IMAGE_STYLE = (
    "text{font:15px system-ui,sans-serif;fill:#808080}.head{font-weight:600}.value{font-weight:600}"
    "polyline{fill:none;stroke-width:3}path{stroke:#80808060}"
)


def best(name: str) -> float:
    """Requests/s within a TTFT of 1 s and a TPOT of 20 ms, for 99 % of the requests."""
    asked = {"prompt_tokens": 2048, "generated_tokens": 128, "slo_ms": {"ttft": 1000.0, "tpot": 20.0}}
    rows = document(f"goodput-h200x4-{name}")["rows"]
    return next(row["best_requests_per_s"] for row in rows if row.items() >= asked.items())


def layouts() -> str:
    """A bar for each system."""
    title, bars = "Requests/s on four H200 with tokens at most 20 ms apart", {name: best(name) for name in SYSTEMS}
    parts = []
    for number, (name, value) in enumerate(bars.items()):
        top, (text, tone) = _HEAD + number * _BAR_STEP, SYSTEMS[name]
        length = value / max(bars.values()) * (_WIDTH - _VALUE_WIDTH)
        parts.append(
            f'<text x="0" y="{top + 16}">{escape(text)}</text>'
            f'<rect fill="{_COLOURS[tone]}" x="0" y="{top + 23}" width="{length:.1f}" height="18" rx="2"/>'
            f'<text class="value" x="{length + 8:.1f}" y="{top + 38}">{value:.1f}</text>'
        )
    return _image(title, _HEAD + len(bars) * _BAR_STEP, "".join(parts))


def turn() -> str:
    """A line for each system: the share of the requests that met the objectives, by when they began."""
    rows, width = document("turn-h200-quarters")["rows"], _WIDTH - _LEFT
    end_s = max(row["until_s"] for row in rows)
    parts = []
    for number, name in enumerate(_PHASES):
        left = _LEFT + number / len(_PHASES) * width
        parts.append(
            f'<path d="M{left:.1f} {_TOP}v{_HEIGHT}"/><text x="{left + 6:.1f}" y="{_TOP - 6}">{name}</text>'
            f'<text x="{left:.1f}" y="{_TOP + _HEIGHT + 18}">{number / len(_PHASES) * end_s:.0f} s</text>'
        )
    parts.append(f'<text x="0" y="{_TOP + 5}">100 %</text><text x="0" y="{_TOP + _HEIGHT + 5}">0 %</text>')
    label = _LEFT
    for row in rows:
        windows, name = row["windows"], row["system"]
        step = row["until_s"] / len(windows) / end_s * width
        points = " ".join(
            f"{_LEFT + (number + 0.5) * step:.1f},"
            f"{_TOP + _HEIGHT * (1 - window['num_good']['20'] / window['num_requests']):.1f}"
            for number, window in enumerate(windows)
        )
        colour = _COLOURS[_TURN_TONES[name]]
        parts.append(
            f'<polyline stroke="{colour}" points="{points}"/>'
            f'<text class="value" style="fill:{colour}" x="{label}" y="{_TOP + _HEIGHT + 44}">{name}</text>'
        )
        label += 9 * len(name) + 16
    title = "Requests within a TTFT of 2 s and 20 ms per token, as the load turns"
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
