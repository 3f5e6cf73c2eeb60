"""Charts as inline SVG: lines, distributions, bars. No script, no outside asset; colours follow the page's theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 40
_MAX_TICKS = 6
_MIN_LOG_RATIO = 5.0  # below it a logarithmic axis has too few ticks
_MIN_SPAN = 1e-3

# Of an image of its own.
_HEAD = 30
_BAR_STEP = 52
_VALUE_WIDTH = 60
_IMAGE_STYLE = (
    "text{font:15px system-ui,sans-serif;fill:#808080}.head{font-weight:600}.value{font-weight:600}"
    "rect.t0{fill:#3d8bd4}rect.t1{fill:#8a8a8a}rect.t2{fill:#3fa864}"
)

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one group's bars. `tone` picks one of the page's colours, from 0."""

    name: str
    points: Sequence[Point]
    tone: int = 0


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series], log_x: bool = False) -> str:
    """Lines over one axis; with `log_x` positive x only, on a logarithmic axis if they span much."""
    shown = _shown(series, log_x)
    if not shown:
        return _empty(title)
    return _figure(title, _lines(x_label, y_label, shown, log_x), [(each.name, each.tone) for each in shown])


def bar_image(title: str, bars: Sequence[tuple[str, float, int]]) -> str:
    """An SVG file with a horizontal bar for each name, value and tone; its colours do on light and on dark pages."""
    most, width = max(value for _, value, _ in bars), WIDTH - _VALUE_WIDTH
    parts = []
    for number, (name, value, tone) in enumerate(bars):
        top = _HEAD + number * _BAR_STEP
        length = value / most * width
        parts.append(
            f'<text x="0" y="{top + 16}">{escape(name)}</text>'
            f'<rect class="t{tone}" x="0" y="{top + 23}" width="{length:.1f}" height="18" rx="2"/>'
            f'<text class="value" x="{length + 8:.1f}" y="{top + 38}">{value:.1f}</text>'
        )
    box = f"0 0 {WIDTH} {_HEAD + len(bars) * _BAR_STEP}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img"><title>{escape(title)}</title>'
        f'<style>{_IMAGE_STYLE}</style><text class="head" x="0" y="16">{escape(title)}</text>{"".join(parts)}</svg>\n'
    )


def _shown(series: Sequence[Series], log_x: bool) -> list[Series]:
    kept = ((each, [point for point in each.points if point[0] > 0 or not log_x]) for each in series)
    return [Series(each.name, points, each.tone) for each, points in kept if points]


def _lines(x_label: str, y_label: str, shown: Sequence[Series], log_x: bool) -> str:
    xs, ys = ([point[axis] for each in shown for point in each.points] for axis in (0, 1))
    left, right = min(xs), max(xs)
    if right - left < _MIN_SPAN * abs(right):  # rounding errors are no axis
        left, right = left * 0.9, right * 1.1
    scale = _Scale(left, right, 0.0, max(ys), log_x and right >= _MIN_LOG_RATIO * left)
    lines = [
        f'<polyline class="t{each.tone}" points="'
        + " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in each.points)
        + f'"><title>{escape(each.name)}</title></polyline>'
        for each in shown
    ]
    return _axes(scale, x_label, y_label) + "".join(lines)


def bar_chart(title: str, y_label: str, bars: Sequence[tuple[str, float]], tone: int = 0) -> str:
    """A bar for each name. Names are shown when pointed at, and below where there is room."""
    if not bars:
        return _empty(title)
    scale = _Scale(0.0, float(len(bars)), 0.0, max(value for _, value in bars), False)
    step = (WIDTH - _LEFT - _RIGHT) / len(bars)
    parts = []
    for number, (name, value) in enumerate(bars):
        top = scale.y(value)
        label = f"{escape(name)}: {value:g}"
        parts.append(
            f'<rect class="t{tone}" x="{scale.x(number) + step * 0.1:.1f}" y="{top:.1f}" '
            f'width="{step * 0.8:.2f}" height="{HEIGHT - _BOTTOM - top:.1f}"><title>{label}</title></rect>'
        )
        if step > 36:
            middle = scale.x(number) + step / 2
            parts.append(f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - 22}" text-anchor="middle">')
            parts.append(f"{escape(name[: int(step / 7)])}</text>")
    return _figure(title, _axes(scale, "", y_label, has_x=False) + "".join(parts), [])


class _Scale:
    """From values to pixels."""

    def __init__(self, left: float, right: float, bottom: float, top: float, log_x: bool) -> None:
        self.left, self.right, self.bottom, self.log_x = left, right, bottom, log_x
        self.top = top if top > bottom else bottom + 1.0

    def x(self, value: float) -> float:
        left, right, value = (math.log(each) if self.log_x else each for each in (self.left, self.right, value))
        share = 0.5 if right <= left else (value - left) / (right - left)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.bottom) / (self.top - self.bottom) * (HEIGHT - _TOP - _BOTTOM)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two others, at most six."""
    if high <= low:
        return [low]
    rough = (high - low) / (_MAX_TICKS - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two numbers, or the powers alone where those are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    found = [factor * 10.0**power for power in powers for factor in factors]
    return [each for each in found if low * 0.999 <= each <= high * 1.001]


def _axes(scale: _Scale, x_label: str, y_label: str, has_x: bool = True) -> str:
    parts = []
    for value in ticks(scale.bottom, scale.top):
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    if has_x:
        for value in log_ticks(scale.left, scale.right) if scale.log_x else ticks(scale.left, scale.right):
            x = scale.x(value)
            parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 22}" text-anchor="middle">{value:g}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text class="label" transform="translate(14 {(_TOP + HEIGHT - _BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>'
    )
    return "".join(parts)


def _figure(title: str, body: str, legend: Sequence[tuple[str, int]]) -> str:
    keys = ""
    if len(legend) > 1:
        items = "".join(f'<span class="key t{tone}">{escape(name)}</span>' for name, tone in legend)
        keys = f"<p>{items}</p>"
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{keys}"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg></figure>'
    )


def _empty(title: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption><p>nothing to show</p></figure>"
