"""The outcomes of the requests of a simulation, and the figures derived from them."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.simulator.scenario import Slo

SERVED, CUT, FAILED, REFUSED = range(4)
OUTCOMES = ("served", "cut", "failed", "refused")  # cut: lost after its first token, which no router tries again


@dataclass(slots=True)
class Outcome:
    """One row per request, in the order of their ends. Times in simulated seconds."""

    at_s: array = field(default_factory=lambda: array("d"))
    ttft_s: array = field(default_factory=lambda: array("d"))  # nan without a first token
    end_s: array = field(default_factory=lambda: array("d"))
    tpot_s: array = field(default_factory=lambda: array("d"))  # nan with one token
    kind: array = field(default_factory=lambda: array("b"))
    was_cold: array = field(default_factory=lambda: array("b"))  # it waited for its adapter
    cold_load_s: array = field(default_factory=lambda: array("d"))  # when loads began
    num_arrived: int = 0
    num_retries: int = 0
    num_loads: int = 0
    num_fills: int = 0
    num_events: int = 0
    num_changes: int = 0  # of roles
    cpu_s: float = 0.0
    simulated_s: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)  # share of time, by role and what they do

    def count(self, kind: int) -> int:
        return self.kind.count(kind)

    def summary(self, slo: Slo, from_s: float = 0.0, until_s: float = math.inf) -> dict[str, Any]:
        """The figures of the requests that arrived in this time."""
        at_s, ttft, tpot, kind, cold, end_s = self._columns()
        chosen = (at_s >= from_s) & (at_s < until_s)
        served = chosen & (kind == SERVED)
        good = served & (ttft <= slo.ttft_s) & ~(tpot > slo.tpot_s)
        number = int(chosen.sum())
        span_s = min(until_s, float(at_s.max(initial=0.0))) - from_s
        tpots = tpot[served & ~np.isnan(tpot)]
        found = {
            "requests": number,
            **{name: int((chosen & (kind == each)).sum()) for each, name in enumerate(OUTCOMES)},
            "good_share": _rounded(good.sum() / number) if number else 0.0,
            "goodput_per_s": _rounded(good.sum() / span_s) if span_s > 0 else 0.0,
            **_quantiles("ttft_ms", 1000 * ttft[served], (0.5, 0.95, 0.99)),
            **_quantiles("tpot_ms", 1000 * tpots, (0.5, 0.95)),
            **_quantiles("e2e_s", (end_s - at_s)[served], (0.5, 0.95)),
            "waited_for_adapter_share": _rounded((chosen & (cold == 1)).sum() / number) if number else 0.0,
        }
        return found

    def over_time(self, slo: Slo, step_s: float) -> list[dict[str, float]]:
        """By time of arrival: p99 of TTFT, good share and cold loads of each step."""
        at_s, ttft, tpot, kind, _, _ = self._columns()
        loads = np.frombuffer(self.cold_load_s) if self.cold_load_s else np.empty(0)
        rows = []
        for begin in np.arange(0.0, float(at_s.max(initial=0.0)), step_s):
            chosen = (at_s >= begin) & (at_s < begin + step_s)
            served = chosen & (kind == SERVED)
            good = served & (ttft <= slo.ttft_s) & ~(tpot > slo.tpot_s)
            row: dict[str, float] = {"at_s": _rounded(float(begin)), "requests": int(chosen.sum())}
            row |= _quantiles("ttft_ms", 1000 * ttft[served], (0.5, 0.99))
            row["good_share"] = _rounded(good.sum() / max(1, chosen.sum()))
            row["not_served"] = int((chosen & (kind != SERVED)).sum())
            row["cold_loads"] = int(((loads >= begin) & (loads < begin + step_s)).sum())
            rows.append(row)
        return rows

    def _columns(self) -> tuple[np.ndarray, ...]:
        times = (np.array(column) for column in (self.at_s, self.ttft_s, self.tpot_s))
        at_s, ttft, tpot = times
        return at_s, ttft, tpot, np.array(self.kind), np.array(self.was_cold), np.array(self.end_s)


def _quantiles(name: str, values: np.ndarray, shares: tuple[float, ...]) -> dict[str, float]:
    """Without interpolation; 0 where there are no values."""
    ordered = np.sort(values)
    return {
        f"{name}_p{round(100 * share)}": _rounded(ordered[max(0, math.ceil(share * len(ordered)) - 1)])
        if len(ordered)
        else 0.0
        for share in shares
    }


def _rounded(value: float) -> float:
    """Four digits, which is more than any of this is worth."""
    return float(f"{float(value):.4g}")
