"""Finds the highest rate that meets an objective: doubles it until it fails, then bisects."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bench.errors import BenchError, OptionInvalid

_MAX_PROBES = 24
_MAX_DEFAULT_PROBE_S = 600.0
_MARGIN = 1.5  # of requests: the number that comes in a given time varies
_MIN_REQUESTS = 10
_MANY_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Sweep:
    """Where the search starts and when it ends."""

    first_rate: float = 1.0
    share: float = 0.99  # of the requests that must meet every objective
    precision: float = 0.05  # the last rate that failed is at most so much above the best one
    max_rate: float = 100_000.0
    least_probe_s: float = 30.0
    lowest: float = 1 / 1024  # rate that is tried, of the first
    growth: float = 2.0  # of the rate while none failed, and its inverse while none held
    repeats: int = 1  # probes of the best rate and of the lowest that failed; each is judged by the mean of its probes

    def check(self) -> None:
        """Raises OptionInvalid."""
        if not 0 < self.first_rate <= self.max_rate:
            raise OptionInvalid(f"--rate {self.first_rate:g}: a sweep starts above 0")
        if not 0 < self.share <= 1:
            raise OptionInvalid(f"a share of {self.share:g}: above 0, at most 1")
        if not 0.001 <= self.precision < 1:
            raise OptionInvalid(f"--precision {self.precision:g}: from 0.001 to below 1")
        if not 1.01 <= self.growth <= 4:
            raise OptionInvalid(f"--growth {self.growth:g}: from 1.01 to 4")

    @property
    def min_requests(self) -> int:
        """Requests of a probe: enough that one late request does not decide the outcome, at most 1,000."""
        return max(_MIN_REQUESTS, min(_MANY_REQUESTS, math.ceil(round(1 / max(1e-9, 1 - self.share), 6))))

    def probe_s(self, rate: float) -> float:
        """How long a probe lasts unless --duration-s says it: longer than the least for enough requests."""
        return min(_MAX_DEFAULT_PROBE_S, max(self.least_probe_s, _MARGIN * self.min_requests / rate))


class Ended(BenchError):
    """Raised by a probe that was cut short: it tells nothing about its rate, and the probes before it stay valid."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate that was tried."""

    rate: float
    share: float  # of the requests that met every objective
    summary: dict[str, Any]
    came_per_s: float | None = None  # requests; arrivals are random, and a conversation's later turns may be due later


@dataclass(frozen=True, slots=True)
class Found:
    """The end of a sweep."""

    best: float | None  # the highest rate that held; None: not even the lowest that was tried
    is_bounded: bool  # whether a rate above failed; otherwise the best is only the highest that was tried
    probes: tuple[Probe, ...]
    ended: str = ""  # why the search ended before the best rate was known as precisely as asked for


async def search(sweep: Sweep, probe: Callable[[float], Awaitable[Probe]], known: Sequence[Probe] = ()) -> Found:
    """Try rates until the best one is known. `probe` runs a load at one rate. Raises BenchError.

    `known` are probes of the same load that were made already; the first rate is tried if they leave it open. A probe
    that raises Ended ends the search; if it was the first one, that is the error.
    """
    sweep.check()
    probes = list(known)
    while len(probes) < _MAX_PROBES + len(known):
        holds, fails = _bounds(sweep, probes)
        rate = next_rate(sweep, holds, fails) if probes else sweep.first_rate
        if rate is not None and (holds or 0.0) < sweep.first_rate < (fails or math.inf):
            rate = sweep.first_rate
        if rate is None:
            rate = _to_repeat(sweep, probes, holds, fails)
        if rate is None:
            break
        try:
            probes.append(await probe(rate))
        except Ended as ended:
            if not probes:
                raise
            return Found(holds, fails is not None, tuple(probes), str(ended))
    holds, fails = _bounds(sweep, probes)
    return Found(holds, fails is not None, tuple(probes))


def _bounds(sweep: Sweep, probes: Sequence[Probe]) -> tuple[float | None, float | None]:
    """The highest rate that held and the lowest that failed."""
    rates = {each.rate for each in probes}
    held = {rate: fmean(each.share for each in probes if each.rate == rate) >= sweep.share for rate in rates}
    return (
        max((rate for rate, is_held in held.items() if is_held), default=None),
        min((rate for rate, is_held in held.items() if not is_held), default=None),
    )


def _to_repeat(sweep: Sweep, probes: Sequence[Probe], holds: float | None, fails: float | None) -> float | None:
    """The rate at the border that was probed least, if less often than wanted; of two the one that held."""
    counts = {rate: sum(each.rate == rate for each in probes) for rate in (holds, fails) if rate is not None}
    rate = min(counts, key=lambda each: counts[each], default=None)
    return rate if rate is not None and counts[rate] < sweep.repeats else None


def next_rate(sweep: Sweep, holds: float | None, fails: float | None) -> float | None:
    """The rate to try after the highest that held and the lowest that failed; None: it is found, or out of bounds.

    A rate that holds above one that failed is noise: the lowest that failed ends the search.
    """
    if fails is None:
        assert holds is not None
        return min(holds * sweep.growth, sweep.max_rate) if holds < sweep.max_rate else None
    if holds is None:
        lower = fails / sweep.growth
        return lower if lower >= sweep.first_rate * sweep.lowest else None
    if fails <= holds * (1 + sweep.precision):
        return None
    return min((holds * fails) ** 0.5, holds * sweep.growth)


def verdict(found: Found) -> str:
    """The result in a sentence."""
    if found.ended:
        known = "none is known to hold" if found.best is None else f"{found.best:.4g} requests/s held the objectives"
        return f"{known}; the search ended early: {found.ended}"
    if found.best is None:
        lowest = min(each.rate for each in found.probes)
        return f"no rate held the objectives; the lowest tried was {lowest:g} requests/s"
    if not found.is_bounded:
        return f"at least {found.best:.4g} requests/s hold the objectives; no rate above was tried"
    return f"{found.best:.4g} requests/s hold the objectives"
