"""Compares two loads: ratios B / A with bootstrap confidence intervals. Pure; equal files give equal intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.load.record import Record
from bench.load.summary import duration_s, meets

CONFIDENCE = 0.95
_RESAMPLES = 2000
_BLOCK_S = 1.0  # of the rates: requests that end in the same second are kept together
_MIN_BLOCKS = 10  # fewer say nothing about how much they vary
_MAX_SHOWN = 100  # characters of a setting
_CHUNK = 4_000_000  # numbers drawn at a time

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure of two loads. Latencies are better below 1, rates above."""

    name: str
    unit: str
    a: float
    b: float
    ratio: float
    low: float | None  # of the confidence interval; None: too few seconds for one
    high: float | None

    @property
    def is_clear(self) -> bool:
        """Whether there is an interval and it leaves out 1."""
        return self.low is not None and not self.has_one

    @property
    def has_one(self) -> bool:
        """Whether 1 is in the interval."""
        return self.low is not None and self.high is not None and self.low <= 1 <= self.high

    @property
    def interval(self) -> str:
        """For reading."""
        return "none: too short" if self.low is None else f"{self.low:.3f} to {self.high:.3f}"


def compare(
    a: Sequence[Record], b: Sequence[Record], slo_ms: dict[str, float] | None = None, seed: int = 1
) -> list[Ratio]:
    """All figures that both loads have."""
    generator = np.random.default_rng(seed)
    found = []
    for name, values in _LATENCIES.items():
        of_a, of_b = values(a), values(b)
        if len(of_a) and len(of_b):
            found += _latency_ratios(name, of_a, of_b, generator)
    for name, unit, amount in _RATES:
        found += _ratio(name, unit, *(_resampled_rates(each, amount, generator) for each in (a, b)))
    if slo_ms:
        found += _ratio(
            "goodput",
            "requests/s",
            *(_resampled_rates(each, lambda one: float(meets(one, slo_ms)), generator) for each in (a, b)),
        )
    return found


def _good(value: Callable[[Record], float | None]) -> Callable[[Sequence[Record]], Array]:
    def values(records: Sequence[Record]) -> Array:
        found = (value(each) for each in records if each.error is None)
        return np.array([1000 * each for each in found if each is not None])

    return values


_LATENCIES: dict[str, Callable[[Sequence[Record]], Array]] = {
    "TTFT": _good(lambda record: record.ttft_s),
    "TPOT": _good(lambda record: record.tpot_s),
    "end to end": _good(lambda record: record.e2e_s),
}
_RATES: tuple[tuple[str, str, Callable[[Record], float]], ...] = (
    ("answered", "requests/s", lambda record: float(record.error is None)),
    ("output", "tokens/s", lambda record: float(record.output_tokens) if record.error is None else 0.0),
)
_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def _latency_ratios(name: str, a: Array, b: Array, generator: np.random.Generator) -> list[Ratio]:
    """Requests are drawn again, all quantiles from the same draws."""
    drawn_a, drawn_b = _resampled_quantiles(a, generator), _resampled_quantiles(b, generator)
    found = []
    for column, (label, share) in enumerate(_QUANTILES):
        of_a, of_b = (float(np.quantile(each, share, method="inverted_cdf")) for each in (a, b))
        found += _ratio(f"{name} {label}", "ms", (of_a, drawn_a[:, column]), (of_b, drawn_b[:, column]))
    return found


def _resampled_quantiles(values: Array, generator: np.random.Generator) -> Array:
    """[_RESAMPLES, quantiles]"""
    shares = [share for _, share in _QUANTILES]
    rows = max(1, _CHUNK // len(values))
    parts = []
    for begin in range(0, _RESAMPLES, rows):
        count = min(rows, _RESAMPLES - begin)
        drawn = values[generator.integers(0, len(values), (count, len(values)))]
        parts.append(np.quantile(drawn, shares, axis=1, method="inverted_cdf").T)
    return np.concatenate(parts)


def _resampled_rates(
    records: Sequence[Record], amount: Callable[[Record], float], generator: np.random.Generator
) -> tuple[float, Array]:
    """The rate, and rates of loads made of seconds that are drawn again; none of these for too few seconds."""
    seconds = duration_s(records)
    origin_s = min((each.intended_s for each in records), default=0.0)
    blocks = np.zeros(max(1, int(np.ceil(seconds / _BLOCK_S))))
    for record in records:
        blocks[min(len(blocks) - 1, int((record.end_s - origin_s) / _BLOCK_S))] += amount(record)
    per_s = 0.0 if seconds == 0 else float(blocks.sum()) / seconds
    if len(blocks) < _MIN_BLOCKS:
        return per_s, np.array([])
    drawn = blocks[generator.integers(0, len(blocks), (_RESAMPLES, len(blocks)))]
    return per_s, drawn.sum(axis=1) / max(seconds, 1e-9)


def _ratio(name: str, unit: str, a: tuple[float, Array], b: tuple[float, Array]) -> list[Ratio]:
    """Empty where A has nothing to divide by."""
    (value_a, drawn_a), (value_b, drawn_b) = a, b
    if value_a <= 0:
        return []
    if not len(drawn_a) or not len(drawn_b):
        return [Ratio(name, unit, value_a, value_b, value_b / value_a, None, None)]
    is_defined = drawn_a > 0
    if not is_defined.any():
        return []
    ratios = drawn_b[is_defined] / drawn_a[is_defined]
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(each) for each in np.quantile(ratios, [tail, 1 - tail]))
    return [Ratio(name, unit, value_a, value_b, value_b / value_a, low, high)]


def failures(a: Sequence[Record], b: Sequence[Record]) -> str:
    """How many requests failed on each side: they are in no latency."""
    parts = [
        f"{side}: {sum(each.error is not None for each in records)} of {len(records)}"
        for side, records in (("A", a), ("B", b))
    ]
    return f"failed requests, which are in no latency: {'; '.join(parts)}"


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What makes two files hard to compare: other requests, another pace, another machine."""
    found = []
    for name in ("name", "num_digested", "sha256"):
        if a["workload"].get(name) != b["workload"].get(name):
            found.append(f"workload {name}: {a['workload'].get(name)} and {b['workload'].get(name)}")
            if name == "num_digested":
                break  # digests of other numbers of requests differ anyway
    for name in sorted({*a["settings"], *b["settings"]} - {"url"}):
        of_a, of_b = (each["settings"].get(name) for each in (a, b))
        if of_a != of_b:
            found.append(f"{name}: {str(of_a)[:_MAX_SHOWN]} and {str(of_b)[:_MAX_SHOWN]}")
    for name in ("cpu", "cores"):
        if a["hardware"].get(name) != b["hardware"].get(name):
            found.append(f"the generator's {name}: {a['hardware'].get(name)} and {b['hardware'].get(name)}")
    return found


def table(ratios: Sequence[Ratio]) -> str:
    """A line per figure."""
    lines = [f"{'':<18}{'A':>12}{'B':>12}{'B / A':>9}   {CONFIDENCE:.0%} interval"]
    for each in ratios:
        clear = "  (1 is in it)" if each.has_one else ""
        lines.append(
            f"{each.name:<18}{each.a:>12.3f}{each.b:>12.3f}{each.ratio:>9.3f}   {each.interval}{clear}  {each.unit}"
        )
    return "\n".join(lines)
