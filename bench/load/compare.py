"""Compares the loads of two systems: ratios B / A with bootstrap confidence intervals."""

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
MIN_REPEATS = 3  # fewer say nothing about how much they vary, either

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


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a system, the mean over its loads, and values that it may as well have had."""

    name: str
    unit: str
    value: float
    drawn: Array  # [_RESAMPLES], or empty: too few seconds to say how much it varies

    @property
    def interval(self) -> tuple[float | None, float | None]:
        """The confidence interval; Nones where there is none."""
        return _interval(self.drawn) if len(self.drawn) else (None, None)


def figures_of(
    loads: Sequence[Sequence[Record]], slo_ms: dict[str, float] | None = None, seed: int = 1
) -> list[Figure]:
    """All figures of one system's loads: of each load, then their mean. Failed requests are in no latency."""
    generator = np.random.default_rng(seed)
    found = []
    for name, values in _LATENCIES.items():
        of_loads = [values(each) for each in loads]
        if all(len(each) for each in of_loads):
            found += _latency_figures(name, of_loads, generator)
    rates = _RATES
    if slo_ms:
        rates = (*rates, ("goodput", "requests/s", lambda record: float(meets(record, slo_ms))))
    for name, unit, amount in rates:
        found.append(_rate_figure(name, unit, loads, amount, generator))
    return found


def ratios_of(a: Sequence[Figure], b: Sequence[Figure]) -> list[Ratio]:
    """B / A of every figure that both have."""
    of_b = {each.name: each for each in b}
    return [ratio for each in a if each.name in of_b for ratio in _ratio(each, of_b[each.name])]


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
    (
        "prompt + output",
        "tokens/s",
        lambda record: float((record.prompt_tokens or 0) + record.output_tokens) if record.error is None else 0.0,
    ),
)
_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def _latency_figures(name: str, loads: Sequence[Array], generator: np.random.Generator) -> list[Figure]:
    """Requests are drawn again, all quantiles from the same draws."""
    drawn = _over_repeats([_resampled_quantiles(each, generator) for each in loads])
    found = []
    for column, (label, share) in enumerate(_QUANTILES):
        values = [float(np.quantile(each, share, method="inverted_cdf")) for each in loads]
        found.append(Figure(f"{name} {label}", "ms", float(np.mean(values)), drawn[:, column]))
    return found


def _resampled_quantiles(values: Array, generator: np.random.Generator) -> Array:
    """[_RESAMPLES, quantiles] of as many values drawn again, of which only the ranks in question are drawn.

    The k-th smallest of n uniform numbers has the distribution Beta(k, n - k + 1); those above it are uniform again.
    """
    ordered, count = np.sort(values), len(values)
    ranks = 1 + np.quantile(np.arange(count), [share for _, share in _QUANTILES], method="inverted_cdf")
    position, columns, below = np.zeros(_RESAMPLES), [], 0
    for rank in ranks.astype(int):
        if rank > below:
            position = position + (1 - position) * generator.beta(rank - below, count - rank + 1, _RESAMPLES)
        columns.append(ordered[np.minimum((position * count).astype(int), count - 1)])
        below = rank
    return np.stack(columns, axis=1)


def _over_repeats(drawn: Sequence[Array]) -> Array:
    """Means over the loads of one system; with enough of them, over loads that are drawn again, too.

    The same ones for every system, since loads of one repeat run close together.
    """
    if len(drawn) < MIN_REPEATS:
        return np.mean(drawn, axis=0)
    picks = np.random.default_rng(0).integers(0, len(drawn), (len(drawn), _RESAMPLES))
    stacked = np.stack(drawn)
    return np.mean([stacked[each, np.arange(_RESAMPLES)] for each in picks], axis=0)


def _rate_figure(
    name: str,
    unit: str,
    loads: Sequence[Sequence[Record]],
    amount: Callable[[Record], float],
    generator: np.random.Generator,
) -> Figure:
    """Loads are made of seconds that are drawn again, if all together have enough of them."""
    seconds = [duration_s(each) for each in loads]
    blocks = [_in_blocks(records, length_s, amount) for records, length_s in zip(loads, seconds, strict=True)]
    rates = [float(each.sum()) / length_s if length_s else 0.0 for each, length_s in zip(blocks, seconds, strict=True)]
    if sum(len(each) for each in blocks) < _MIN_BLOCKS:
        return Figure(name, unit, float(np.mean(rates)), np.array([]))
    drawn = [
        each[generator.integers(0, len(each), (_RESAMPLES, len(each)))].sum(axis=1) / max(length_s, 1e-9)
        for each, length_s in zip(blocks, seconds, strict=True)
    ]
    return Figure(name, unit, float(np.mean(rates)), _over_repeats(drawn))


def _in_blocks(records: Sequence[Record], seconds: float, amount: Callable[[Record], float]) -> Array:
    origin_s = min((each.intended_s for each in records), default=0.0)
    blocks = np.zeros(max(1, int(np.ceil(seconds / _BLOCK_S))))
    for record in records:
        blocks[min(len(blocks) - 1, int((record.end_s - origin_s) / _BLOCK_S))] += amount(record)
    return blocks


def _ratio(a: Figure, b: Figure) -> list[Ratio]:
    """Empty where A has nothing to divide by."""
    if a.value <= 0:
        return []
    if not len(a.drawn) or not len(b.drawn):
        return [Ratio(a.name, a.unit, a.value, b.value, b.value / a.value, None, None)]
    is_defined = a.drawn > 0
    if not is_defined.any():
        return []
    low, high = _interval(b.drawn[is_defined] / a.drawn[is_defined])
    return [Ratio(a.name, a.unit, a.value, b.value, b.value / a.value, low, high)]


def _interval(values: Array) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(each) for each in np.quantile(values, [tail, 1 - tail]))
    return low, high
