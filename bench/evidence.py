"""Write the generated tables and the README's chart from bench/results/: `python -m bench.evidence`.

A page marks the place of a table with the comments `<!-- table NAME -->` and `<!-- end -->`; what stands between them
is generated. Other pages quote single numbers, which `tests/unit/docs/test_evidence.py` compares with the files.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = ("docs/simulator.md",)

_BLOCK = re.compile(r"<!-- table ([a-z0-9-]+) -->\n.*?<!-- end -->", re.DOTALL)


def document(name: str) -> dict[str, Any]:
    """A file of bench/results/."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def main() -> None:
    """Rewrite the pages and plots, and name those that changed."""
    pages = {name: rendered((ROOT / name).read_text()) for name in PAGES}
    for name, after in (pages | {name: draw() for name, draw in PLOTS.items()}).items():
        path = ROOT / name
        if not path.exists() or path.read_text() != after:
            path.write_text(after)
            print(f"{name} updated", file=sys.stderr)


def rendered(page: str) -> str:
    """The page with every table as the results give it. Raises KeyError for a table that nothing generates."""
    return _BLOCK.sub(lambda match: f"<!-- table {match[1]} -->\n\n{TABLES[match[1]]()}\n\n<!-- end -->", page)


def tables_in(page: str) -> list[str]:
    """The names of a page's tables."""
    return [match[1] for match in _BLOCK.finditer(page)]


# ---- tables ---------------------------------------------------------------------------------------------------------

_FIGURES = {"throughput_per_s": 1, "ttft_ms_p50": 0, "ttft_ms_p95": 0, "tpot_ms_p50": 1}  # and their digits


def ratios() -> str:
    """The highest rate of each layout, by lengths and objective; the best of each column in bold."""
    found = document("simulate-h200")["answers"]["ratios"]
    columns = list(dict.fromkeys((row["prompt_tokens"], row["output_tokens"], row["tpot_ms"]) for row in found))
    rates = {
        (row["pools"], row["prompt_tokens"], row["output_tokens"], row["tpot_ms"]): row["requests_per_s"]
        for row in found
    }
    rows = []
    for pools in dict.fromkeys(row["pools"] for row in found):
        cells = []
        for column in columns:
            rate, best = rates[pools, *column], max(rates[other["pools"], *column] for other in found)
            cells.append(f"**{rate:.1f}**" if rate == best and rate else f"{rate:.1f}")
        rows.append((pools, *cells))
    head = (f"{prompt} + {output}, TPOT {tpot_ms:g} ms" for prompt, output, tpot_ms in columns)
    return _markdown(("requests/s within the objectives", *head), rows)


def validated() -> str:
    """A real unified worker beside the simulated one."""
    rows = [
        (
            f"{row['load']:g}",
            f"{row['requests_per_s']:.1f}",
            *(
                f"{row[f'simulated_{name}']:.{digits}f}, {row[f'measured_{name}']:.{digits}f} "
                f"({100 * row[f'error_{name}']:+.0f}%)"
                for name, digits in _FIGURES.items()
            ),
        )
        for row in document("simulate-validate-h100")["rows"]
    ]
    head = ("load", "requests/s", "answered/s: simulated, measured", "TTFT p50, ms", "TTFT p95, ms", "TPOT p50, ms")
    return _markdown(head, rows)


def _markdown(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = list(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


# ---- the README's chart ---------------------------------------------------------------------------------------------

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
    """An SVG file with a horizontal bar for each system; its colours do on light and on dark pages."""
    title = "Requests/s on four H200 with tokens at most 20 ms apart"
    bars = [(text, best(name), tone) for name, (text, tone) in SYSTEMS.items()]
    most, width = max(value for _, value, _ in bars), _WIDTH - _VALUE_WIDTH
    parts = []
    for number, (name, value, tone) in enumerate(bars):
        top = _HEAD + number * _BAR_STEP
        length = value / most * width
        parts.append(
            f'<text x="0" y="{top + 16}">{escape(name)}</text>'
            f'<rect class="t{tone}" x="0" y="{top + 23}" width="{length:.1f}" height="18" rx="2"/>'
            f'<text class="value" x="{length + 8:.1f}" y="{top + 38}">{value:.1f}</text>'
        )
    box = f"0 0 {_WIDTH} {_HEAD + len(bars) * _BAR_STEP}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img"><title>{escape(title)}</title>'
        f'<style>{_IMAGE_STYLE}</style><text class="head" x="0" y="16">{escape(title)}</text>{"".join(parts)}</svg>\n'
    )


PLOTS: dict[str, Callable[[], str]] = {"docs/images/layouts-h200x4.svg": chart}
TABLES: dict[str, Callable[[], str]] = {"simulated-ratios": ratios, "validated": validated}

if __name__ == "__main__":
    main()
