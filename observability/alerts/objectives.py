"""Service level objectives: what is recorded of them, and the alerts on how fast their error budgets burn.

Multi-window, multi-burn-rate alerts, as in chapter 5 of Google's Site Reliability Workbook: a long window shows that
enough is lost to matter, a short one that it is still going on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from observability.alerts.alert import Alert, Recorded

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
_FAST = ((14.4, "1h", "5m"), (6.0, "6h", "30m"))  # 2% of 30 days' budget in an hour, 5% in six
_SLOW = ((3.0, "1d", "2h"), (1.0, "3d", "6h"))  # 10% in a day, in three
_MIN_FAILURES = 10  # in the long window: a few failures of a few requests wake nobody

_REQUESTS, _SLO = "prelude_router_requests_total", "prelude_router_slo_requests_total"
_STREAMS = "prelude_router_stream_errors_total"


@dataclass(frozen=True, slots=True)
class Objective:
    """One objective, by what its requests do that miss it."""

    name: str  # in names of rules
    title: str  # in names of alerts
    target: float  # share of requests that keep it, over 30 days
    page: str
    failure: str  # in words, plural

    @property
    def budget(self) -> float:
        """Share of requests that may miss it."""
        return round(1 - self.target, 6)


def objectives(available: float, in_time: float) -> tuple[Objective, Objective]:
    """Both objectives, for the shares of requests that keep them."""
    return (
        Objective("unavailable", "Error", available, "requests-fail", "requests fail"),
        Objective("slow", "Latency", in_time, "requests-are-slow", "answers miss the times of router.slo"),
    )


def recorded(objective: Objective) -> Iterator[Recorded]:
    """Share of requests that missed it, requests that did, and the burn rate, over each window."""
    for window in WINDOWS:
        missed, asked = _rates(objective, window)
        yield Recorded(f"prelude:{objective.name}:ratio_rate{window}", f"({missed}) / ({asked} > 0)")
        yield Recorded(
            f"prelude:{objective.name}:burn_rate{window}",
            f"prelude:{objective.name}:ratio_rate{window} / {objective.budget:g}",
        )
    for window in sorted({long for _, long, _ in (*_FAST, *_SLOW)}):
        missed, _ = _rates(objective, window)
        yield Recorded(f"prelude:{objective.name}:missed_rate{window}", missed)


def burn_alerts(objective: Objective) -> tuple[Alert, Alert]:
    """One that pages, and one for a ticket."""
    text = (
        f"Too many {objective.failure} in {{{{ $labels.namespace }}}}: the error budget of 30 days burns "
        '{{ $value | printf "%.1f" }} times as fast as it may.'
    )
    return (
        Alert(
            f"Prelude{objective.title}BudgetBurnsFast",
            "critical",
            _burns(objective, _FAST),
            "2m",
            objective.page,
            f"Too many {objective.failure}: the budget of 30 days lasts for days or hours",
            text,
        ),
        Alert(
            f"Prelude{objective.title}BudgetBurnsSlowly",
            "warning",
            _burns(objective, _SLOW),
            "15m",
            objective.page,
            f"Too many {objective.failure}: the budget will not last for 30 days",
            text,
        ),
    )


def _burns(objective: Objective, steps: tuple[tuple[float, str, str], ...]) -> str:
    def step(factor: float, long: str, short: str) -> str:
        name = f"prelude:{objective.name}"
        return (
            f"({name}:burn_rate{long} > {factor:g} and {name}:burn_rate{short} > {factor:g}"
            f" and {name}:missed_rate{long} * {_seconds(long)} > {_MIN_FAILURES})"
        )

    return " or ".join(step(*each) for each in steps)


def _rates(objective: Objective, window: str) -> tuple[str, str]:
    """Requests per second that miss the objective, and those that count, by release."""
    if objective.name == "slow":
        asked = f"sum by (namespace, release) (rate({_SLO}[{window}]))"
        return f'{asked} - (sum by (namespace, release) (rate({_SLO}{{met="true"}}[{window}])) or {asked} * 0)', asked
    asked = f'sum by (namespace, release) (rate({_REQUESTS}{{status!="499"}}[{window}]))'
    failed = f'sum by (namespace, release) (rate({_REQUESTS}{{status=~"5.."}}[{window}]))'
    broken = f'sum by (namespace, release) (rate({_STREAMS}{{code!="client_too_slow"}}[{window}]))'
    return f"({failed} or {asked} * 0) + ({broken} or {asked} * 0)", asked


def _seconds(window: str) -> int:
    return int(window[:-1]) * {"m": 60, "h": 3600, "d": 86400}[window[-1]]
