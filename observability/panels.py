"""Dashboards as data, and the JSON that Grafana imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from observability.queries import scoped

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCOPE = 'namespace=~"$namespace"'  # also matches series without the label, as it stands for .* by default
_COLUMNS, _HEIGHT = 24, 8
_SCHEMA_VERSION = 41  # of Grafana 11 and 12, which migrate older ones

# Grafana's ids of the units that we use. It takes any text, and shows what it does not know as it is.
UNITS = {
    "none": "a number",
    "short": "a large number",
    "percentunit": "a share of 1",
    "s": "seconds",
    "ms": "milliseconds",
    "bytes": "bytes",
    "MBs": "megabytes per second",
    "reqps": "requests per second",
    "ops": "operations per second",
    "suffix: tok/s": "tokens per second",
    "suffix: ×": "a factor",
}


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel. `legend` may name labels: {{worker}}."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `description` says what it shows and what a reader should conclude."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"  # or "stat"
    width: int = 8
    stacked: bool = False
    maximum: float | None = None
    limit: float | None = None  # drawn as a line; above it, something is to be done


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    description: str
    panels: tuple[Panel, ...]

    @property
    def file_name(self) -> str:
        return f"{self.uid}.json"


def as_grafana(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard in Grafana's JSON. Raises UnknownMetric."""
    panels, x, y = [], 0, 0
    for number, panel in enumerate(dashboard.panels, 1):
        if x + panel.width > _COLUMNS:
            x, y = 0, y + _HEIGHT
        place = {"h": _HEIGHT, "w": panel.width, "x": x, "y": y}
        panels.append(_panel(number, panel, place))
        x += panel.width
    return {
        "uid": dashboard.uid,
        "title": f"Prelude / {dashboard.title}",
        "description": dashboard.description,
        "tags": ["prelude"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "asDropdown": False,
                "icon": "external link",
                "includeVars": True,
                "keepTime": True,
                "tags": ["prelude"],
                "targetBlank": False,
                "title": "Prelude",
                "tooltip": "",
                "type": "dashboards",
                "url": "",
            }
        ],
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0},
        {
            "name": "namespace",
            "label": "Namespace",
            "description": "Of the cluster that Prelude runs in; all, where series have no such label.",
            "type": "query",
            "datasource": _DATASOURCE,
            "query": "label_values(prelude_router_processes, namespace)",
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
            "hide": 0,
        },
    ]


def _panel(number: int, panel: Panel, place: Mapping[str, int]) -> dict[str, Any]:
    is_series = panel.kind == "timeseries"
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": _thresholds(panel.limit)}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if is_series:
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 20 if panel.stacked else 0,
            "lineWidth": 1,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "off" if panel.limit is None else "dashed"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": dict(place),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _series_options() if is_series else _stat_options(),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": scoped(query.expression, SCOPE),
                "legendFormat": query.legend,
                "range": True,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _thresholds(limit: float | None) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if limit is not None:
        steps.append({"color": "red", "value": limit})
    return {"mode": "absolute", "steps": steps}


def _series_options() -> dict[str, Any]:
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _stat_options() -> dict[str, Any]:
    return {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "auto",
        "percentChangeColorMode": "standard",
        "showPercentChange": False,
        "wideLayout": True,
    }
