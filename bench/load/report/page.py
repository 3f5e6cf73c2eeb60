"""A self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --grid: #8884; --text: light-dark(#222, #ddd); --back: light-dark(#fff, #161616);
  --t0: light-dark(#1f6fb4, #6cb6ff); --t1: light-dark(#c2571a, #ff9d5c); --t2: light-dark(#2a8a4a, #6fd08c);
  --t3: light-dark(#8a3ab0, #cf93f0); --bad: light-dark(#b00020, #ff6b81); }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1360px;
  margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; }
td, th { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--grid); }
td:first-child, th:first-child { text-align: left; } td.text { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; } figure p { margin: 0; } svg { width: 100%; height: auto; }
polyline { fill: none; stroke-width: 1.6; } .grid { stroke: var(--grid); }
.tick, .label { font-size: 11px; fill: var(--text); }
.key { margin-right: 1rem; } .key::before { content: "\\25A0\\00A0"; }
polyline.t0 { stroke: var(--t0); } polyline.t1 { stroke: var(--t1); } polyline.t2 { stroke: var(--t2); }
polyline.t3 { stroke: var(--t3); } rect.t0 { fill: var(--t0); } rect.t1 { fill: var(--t1); }
.key.t0::before { color: var(--t0); } .key.t1::before { color: var(--t1); } .key.t2::before { color: var(--t2); }
.key.t3::before { color: var(--t3); }
.bad { border: 2px solid var(--bad); padding: .6rem 1rem; } .facts { overflow-wrap: anywhere; }
"""


def page(title: str, body: Sequence[str]) -> str:
    """A whole HTML document; nothing in it is loaded from elsewhere."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def section(charts: Sequence[str]) -> str:
    """Charts beside each other."""
    return f'<div class="charts">{"".join(charts)}</div>'


def table_of(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A table. Every cell is escaped."""
    titles = "".join(f"<th>{escape(each)}</th>" for each in head) if any(head) else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><tr>{titles}</tr>{body}</table>"
