"""The dashboards: what every panel has, and that its queries are PromQL over metrics that exist."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from support.observability.dashboards import DASHBOARDS, RECORDED, RULES, names_of

from engine.pin import SGLANG_VERSION
from observability import registry
from observability.metrics_page import page

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads(Path(__file__).with_name("grafana_schema.json").read_text())
PANELS = [pytest.param(panel, id=f"{each['uid']}-{panel['title']}") for each in DASHBOARDS for panel in each["panels"]]
# Grafana takes any text as a unit, and shows what it does not know as it is.
UNITS = {"none", "short", "percentunit", "s", "ms", "bytes", "MBs", "reqps", "ops", "suffix: tok/s", "suffix: ×"}


def test_there_are_the_seven_that_the_docs_name() -> None:
    titles = {"Throughput", "Latency", "Adapters", "Capacity", "Tenants", "Health", "Trainer"}
    assert {dashboard["title"].removeprefix("Prelude / ") for dashboard in DASHBOARDS} == titles


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows_and_its_queries_name_what_exists(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert len(panel["description"]) > 30
    assert panel["description"].endswith(".")
    assert panel["targets"]
    for query in panel["targets"]:
        names = names_of(query["expr"])
        assert names
        labels: set[str] = {"namespace", "instance", "job", "le"}
        for name, matched in names.items():
            assert "namespace" in matched, name
            if name not in RECORDED:
                own = set(registry.series()[name].labels)
                assert matched <= own | {"namespace", "job"}, name
                labels |= own
        grouped = re.findall(r"by \(([^)]*)\)", query["expr"])
        assert {label for each in grouped for label in re.split(r",\s*", each)} <= labels
        assert query["legendFormat"]
        assert set(re.findall(r"{{(\w+)}}", query["legendFormat"])) <= labels
    legends = {query["legendFormat"] for query in panel["targets"]}
    assert {each["matcher"]["options"] for each in panel["fieldConfig"]["overrides"]} <= legends


def test_client_errors_are_apart_from_server_errors() -> None:
    """4xx is no outage: no line, and no number, adds it to 5xx."""
    for dashboard in DASHBOARDS:
        for panel in dashboard["panels"]:
            for query in panel["targets"]:
                for by in re.findall(r"by \(([^)]*)\) \(rate\(prelude_router_requests_total{([^}]*)}", query["expr"]):
                    assert "status" not in by[0] or 'status=~"4.."' in by[1], panel["title"]
    health = next(each for each in DASHBOARDS if each["uid"] == "prelude-health")
    top = [panel["title"] for panel in health["panels"] if panel["gridPos"]["y"] == 0 and panel["type"] == "stat"]
    assert {"Server errors", "Client errors", "Workers that take requests"} <= set(top)


def test_rules_name_what_exists() -> None:
    for group in RULES["groups"]:
        for rule in group["rules"]:
            unknown = names_of(rule["expr"]).keys() - RECORDED - registry.series().keys()
            assert not unknown, rule


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each["uid"])
def test_a_dashboard_is_one_as_grafana_defines_it(dashboard: dict[str, Any]) -> None:
    """By Grafana's own types: see grafana_schema.json."""
    jsonschema.Draft7Validator(SCHEMA["dashboard"]).validate(dashboard)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        parts = {"options": panel["options"]}
        if panel["type"] == "timeseries":
            parts["custom"] = panel["fieldConfig"]["defaults"]["custom"]
        jsonschema.Draft7Validator(SCHEMA[panel["type"]]).validate(parts)
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        cells = {(column, row) for column in range(x, x + w) for row in range(y, y + h)}
        assert x + w <= 24
        assert not cells & taken
        taken |= cells
    for key in ("title", "id"):
        found = [panel[key] for panel in dashboard["panels"]]
        assert len(set(found)) == len(found)


def kept(made: Any, given: Any) -> Any:
    """What is made of `given`, without the defaults that it leaves out."""
    if isinstance(made, dict):
        return {key: kept(value, given[key]) for key, value in made.items() if key in given}
    return [kept(*pair) for pair in zip(made, given, strict=True)] if isinstance(made, list) else made


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each["uid"])
def test_a_dashboard_loses_nothing_in_grafanas_own_types(dashboard: dict[str, Any]) -> None:
    """In those of its SDK, which know queries of Prometheus too. A key that they do not have gets lost."""
    register_default_plugins()
    made = json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))
    assert kept(made, dashboard) == dashboard


def test_sglang_has_the_metrics_that_are_listed_as_its_own() -> None:
    """In the source of the pinned release, by name and kind."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0]) / "srt" / "observability"
    source = (folder / "metrics_collector.py").read_text()
    by_name = {
        name.removesuffix("_total") if kind == "Counter" else name: kind.lower()
        for kind, name in re.findall(r'(Counter|Gauge|Histogram)\(\s+(?:#[^\n]*\s+)?name="(\S+?)"', source)
    }
    for metric in registry.SGLANG:
        assert by_name.get(metric.name) == metric.kind, f"{metric.name} in SGLang {SGLANG_VERSION}"
    stages = (folder / "req_time_stats.py").read_text()
    for stage in ("prefill_bootstrap", "prefill_forward", "decode_transferred"):
        assert stage in stages


def test_the_page_of_metrics_is_current() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert text == page(), "run `python -m observability.metrics_page > docs/metrics.md`"
