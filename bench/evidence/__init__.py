"""Write the generated tables and the README's chart from bench/results/: `python -m bench.evidence`.

A page marks the place of a table with the comments `<!-- table NAME -->` and `<!-- end -->`; what stands between them
is generated. Other pages quote single numbers, which `tests/unit/docs/test_evidence.py` compares with the files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from bench.evidence import layouts, simulated
from bench.evidence.cells import RESULTS, ROOT

__all__ = ["PAGES", "PLOTS", "RESULTS", "ROOT", "TABLES", "main", "rendered", "tables_in"]

PAGES = ("docs/simulator.md",)

_BLOCK = re.compile(r"<!-- table ([a-z0-9-]+) -->\n.*?<!-- end -->", re.DOTALL)


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


PLOTS: dict[str, Callable[[], str]] = {"docs/images/layouts-h200x4.svg": layouts.chart}

TABLES: dict[str, Callable[[], str]] = {
    "simulated-ratios": simulated.ratios,
    "validated": simulated.validated,
}
