"""The rules file: groups of recording rules and alerts, as Prometheus and a PrometheusRule's `spec` take them."""

from __future__ import annotations

from typing import Any

from observability.alerts import parts, workers
from observability.alerts.alert import Alert
from observability.alerts.objectives import burn_alerts, objectives, recorded
from observability.queries import RECORDED, UnknownMetric, names_in
from observability.registry import series

RUNBOOKS = "docs/operations"  # what `runbook_url` begins with, unless it is told


def alerts(available: float = 0.999, in_time: float = 0.95) -> tuple[Alert, ...]:
    """All alerts, for the shares of requests that have to succeed, and to be as fast as router.slo says."""
    burning = [alert for objective in objectives(available, in_time) for alert in burn_alerts(objective)]
    return (*burning, *workers.ALERTS, *parts.ALERTS)


def rules(available: float = 0.999, in_time: float = 0.95, runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """The content of the rules file. Raises UnknownMetric."""
    groups: list[dict[str, Any]] = [
        {
            "name": f"prelude-{objective.name}",
            "interval": "1m",
            "rules": [{"record": each.name, "expr": each.expression} for each in recorded(objective)],
        }
        for objective in objectives(available, in_time)
    ]
    names = {rule["record"] for group in groups for rule in group["rules"]} | set(series())
    for alert in alerts(available, in_time):
        if unknown := names_in(alert.expression) - names:
            raise UnknownMetric(f"{alert.name}: no process exports {', '.join(sorted(unknown))}")
    groups.append({"name": "prelude", "rules": [_rule(each, runbooks) for each in alerts(available, in_time)]})
    return {"groups": groups}


def recorded_names() -> set[str]:
    """The names of all recording rules."""
    return {each.name for objective in objectives(0.9, 0.9) for each in recorded(objective)}


def _rule(alert: Alert, runbooks: str) -> dict[str, Any]:
    assert not RECORDED.fullmatch(alert.name)
    return {
        "alert": alert.name,
        "expr": alert.expression,
        **({} if alert.lasting == "0m" else {"for": alert.lasting}),
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{runbooks.rstrip('/')}/{alert.page}.md#{alert.name.lower()}",
        },
    }
