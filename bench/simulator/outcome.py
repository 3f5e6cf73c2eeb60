"""What became of the requests of a simulation, and the figures derived from that."""

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.load.summary import quantile


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request has to keep to count as good."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05  # mean of the tokens after the first


@dataclass(slots=True)
class Outcome:
    """One row per request, in the order of their ends. Times in simulated seconds."""

    at_s: array = field(default_factory=lambda: array("d"))
    ttft_s: array = field(default_factory=lambda: array("d"))
    end_s: array = field(default_factory=lambda: array("d"))
    tpot_s: array = field(default_factory=lambda: array("d"))  # nan with one token
    was_cold: array = field(default_factory=lambda: array("b"))  # it waited for its adapter
    num_loads: int = 0
    busy: dict[str, float] = field(default_factory=dict)  # share of time, by role and what they do

    def summary(self, slo: Slo, from_s: float = 0.0) -> dict[str, Any]:
        """The figures of the requests that arrived from then on."""
        at_s, ttft, end_s, tpot, cold = map(np.array, (self.at_s, self.ttft_s, self.end_s, self.tpot_s, self.was_cold))
        chosen = at_s >= from_s
        good = chosen & (ttft <= slo.ttft_s) & ~(tpot > slo.tpot_s)
        number = int(chosen.sum())
        span_s = float(at_s.max(initial=0.0)) - from_s
        return {
            "requests": number,
            "good_share": _rounded(good.sum() / number) if number else 0.0,
            "goodput_per_s": _rounded(good.sum() / span_s) if span_s > 0 else 0.0,
            **_quantiles("ttft_ms", 1000 * ttft[chosen], (0.5, 0.95, 0.99)),
            **_quantiles("tpot_ms", 1000 * tpot[chosen & ~np.isnan(tpot)], (0.5, 0.95)),
            **_quantiles("e2e_s", (end_s - at_s)[chosen], (0.5, 0.95)),
            "waited_for_adapter_share": _rounded((chosen & (cold == 1)).sum() / number) if number else 0.0,
        }


def _quantiles(name: str, values: np.ndarray, shares: tuple[float, ...]) -> dict[str, float]:
    """0 where there are no values."""
    found = {f"{name}_p{round(100 * share)}": quantile(values, share) if len(values) else 0.0 for share in shares}
    return {key: _rounded(value) for key, value in found.items()}


def _rounded(value: float) -> float:
    """Four digits, which is more than any of this is worth."""
    return float(f"{float(value):.4g}")
