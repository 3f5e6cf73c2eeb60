"""When sessions start: due times in seconds since the start of a load. Pure functions of their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from bench.errors import BenchError
from bench.workloads.draws import Draws

ARRIVALS = ("constant", "poisson", "bursts")


@dataclass(frozen=True, slots=True)
class Bursts:
    """A rate that alternates: `factor` times the mean for `length_s` of every `period_s`, and less in between."""

    period_s: float = 10.0
    length_s: float = 1.0
    factor: float = 5.0

    def check(self) -> None:
        """Raises BenchError."""
        if not 0 < self.length_s < self.period_s:
            raise BenchError(f"bursts of {self.length_s:g} s every {self.period_s:g} s: 0 < length < period")
        if not 1 <= self.factor <= self.period_s / self.length_s:
            largest = self.period_s / self.length_s
            raise BenchError(
                f"bursts of {self.factor:g} times the mean rate: with {self.length_s:g} s of every "
                f"{self.period_s:g} s, 1 to {largest:g} are possible"
            )


def due_times(arrivals: str, per_s: float, seed: int, bursts: Bursts | None = None) -> Iterator[float]:
    """When session 0, 1, 2, … is due, without end. Raises BenchError."""
    if not 0 < per_s < 1e6:
        raise BenchError(f"a rate of {per_s:g} per second: it must be above 0 and below a million")
    if arrivals not in ARRIVALS:
        raise BenchError(f"there are no arrivals {arrivals!r}; there are {', '.join(ARRIVALS)}")
    if arrivals == "bursts":
        bursts = bursts or Bursts()
        bursts.check()
        return _bursts(per_s, seed, bursts)
    return (number / per_s for number in count()) if arrivals == "constant" else _poisson(per_s, seed)


def _poisson(per_s: float, seed: int) -> Iterator[float]:
    draws, now_s = Draws(seed, "arrivals"), 0.0
    while True:
        now_s += draws.exponential(1 / per_s)
        yield now_s


def _bursts(per_s: float, seed: int, bursts: Bursts) -> Iterator[float]:
    """A Poisson process of rate 1 in the time that runs as fast as arrivals come (its cumulated rate, inverted)."""
    high = bursts.factor * per_s
    low = (per_s * bursts.period_s - high * bursts.length_s) / (bursts.period_s - bursts.length_s)
    in_burst, in_period = high * bursts.length_s, per_s * bursts.period_s
    draws, passed = Draws(seed, "arrivals"), 0.0
    while True:
        passed += draws.exponential(1.0)
        periods, rest = divmod(passed, in_period)
        within_s = rest / high if rest < in_burst or low <= 0 else bursts.length_s + (rest - in_burst) / low
        yield periods * bursts.period_s + within_s
