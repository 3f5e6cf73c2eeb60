"""The dashboards: what every panel has, and that its queries are PromQL over metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import promql_parser
import pytest

import router.metrics
from engine.pin import SGLANG_VERSION
from observability import queries, registry
from observability.alerts.rules import recorded_names
from observability.dashboards import DASHBOARDS
from observability.generate import generated_files
from observability.metrics_page import page
from observability.panels import UNITS, Dashboard, Panel, Query, as_grafana
from observability.queries import UnknownMetric, scoped

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads(Path(__file__).with_name("grafana_schema.json").read_text())
PANELS = [pytest.param(panel, id=f"{each.uid}-{panel.title}") for each in DASHBOARDS for panel in each.panels]


def runnable(expression: str) -> str:
    """A query as Prometheus takes it, with what Grafana replaces replaced."""
    return expression.replace("$__rate_interval", "1m").replace("$namespace", ".*")


def names_of(expression: str) -> dict[str, set[str]]:
    """The labels that a query matches, by the name of the series, as a parser of PromQL sees them."""
    found: dict[str, set[str]] = {}

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.setdefault(node.name, set()).update(matcher.name for matcher in node.matchers.matchers)
        for attribute in ("lhs", "rhs", "expr", "param", "vector_selector", "args"):
            below = getattr(node, attribute, None)
            for each in below if isinstance(below, list) else [below]:
                if each is not None:
                    visit(each)

    visit(promql_parser.parse(expression))
    return found


def grouped_labels(expression: str) -> Iterator[str]:
    for labels in re.findall(r"by \(([^)]*)\)", expression):
        yield from re.split(r",\s*", labels)


def test_there_are_the_six_that_the_docs_name() -> None:
    titles = ["Throughput", "Latency", "Adapters", "Capacity", "Tenants", "Health"]
    assert [dashboard.title for dashboard in DASHBOARDS] == titles


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows_and_in_which_unit(panel: Panel) -> None:
    assert panel.unit in UNITS
    assert len(panel.description) > 30
    assert panel.description.endswith(".")
    assert panel.queries
    assert all(query.legend for query in panel.queries)


@pytest.mark.parametrize("panel", PANELS)
def test_queries_name_metrics_and_labels_that_exist(panel: Panel) -> None:
    for query in panel.queries:
        names = names_of(runnable(scoped(query.expression, 'namespace=~".*"')))
        assert names
        labels: set[str] = {"namespace", "instance", "job", "le"}
        for name, matched in names.items():
            if name not in recorded_names():
                own = set(registry.series()[name].labels)
                assert matched <= own | {"namespace", "job"}, name
                labels |= own
        assert set(grouped_labels(query.expression)) <= labels
        assert set(re.findall(r"{{(\w+)}}", query.legend)) <= labels


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.uid)
def test_a_dashboard_is_one_as_grafana_defines_it(dashboard: Dashboard) -> None:
    """By Grafana's own types: see grafana_schema.json."""
    document = as_grafana(dashboard)
    jsonschema.Draft7Validator(SCHEMA["dashboard"]).validate(document)
    for panel in document["panels"]:
        parts = {"options": panel["options"]}
        if panel["type"] == "timeseries":
            parts["custom"] = panel["fieldConfig"]["defaults"]["custom"]
        jsonschema.Draft7Validator(SCHEMA[panel["type"]]).validate(parts)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.uid)
def test_panels_have_a_place_of_their_own(dashboard: Dashboard) -> None:
    document = as_grafana(dashboard)
    taken = set()
    for panel in document["panels"]:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        cells = {(column, row) for column in range(x, x + w) for row in range(y, y + h)}
        assert x + w <= 24
        assert not cells & taken
        taken |= cells
    titles = [panel["title"] for panel in document["panels"]]
    assert len(set(titles)) == len(titles)


def test_the_schema_can_refuse() -> None:
    document = as_grafana(DASHBOARDS[0])
    document["panels"][0]["decription"] = "a misspelt key"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(SCHEMA["dashboard"]).validate(document)


def test_the_files_in_the_repository_are_current() -> None:
    for name, text in generated_files().items():
        path = ROOT / "helm" / "files" / name
        assert path.read_text() == text, f"{name} is out of date: run `prelude dashboards`"
    names = {f"dashboards/{path.name}" for path in (ROOT / "helm" / "files" / "dashboards").iterdir()}
    assert names <= set(generated_files()), "a dashboard that is gone has left its file"


def test_a_renamed_metric_fails_what_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = router.metrics.Gauge

    def renamed(name: str, *args: Any, **kwargs: Any) -> Any:
        return real(name.replace("requests_in_flight", "requests_running"), *args, **kwargs)

    monkeypatch.setattr(router.metrics, "Gauge", renamed)
    registry.metrics.cache_clear()
    registry.series.cache_clear()
    try:
        with pytest.raises(UnknownMetric, match="prelude_router_requests_in_flight"):
            generated_files()
    finally:
        registry.metrics.cache_clear()
        registry.series.cache_clear()


def test_every_selector_is_scoped() -> None:
    query = 'sum(rate(prelude_router_requests_total{status="200"}[5m])) / sum(up) + prelude:slow:burn_rate1h'
    assert scoped(query, 'n="x"') == (
        'sum(rate(prelude_router_requests_total{n="x", status="200"}[5m])) / sum(up{n="x"})'
        ' + prelude:slow:burn_rate1h{n="x"}'
    )
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query in panel.queries:
                names = names_of(runnable(scoped(query.expression, 'namespace=~".*"')))
                assert all("namespace" in matched for matched in names.values())
                assert set(names) == queries.names_in(query.expression)


def test_unknown_metrics_are_refused() -> None:
    panel = Panel("x", "x", "none", (Query("sum(prelude_router_nonsense_total)", "x"),))
    with pytest.raises(UnknownMetric, match="prelude_router_nonsense_total"):
        as_grafana(Dashboard("x", "x", "x", (panel,)))


def test_sglang_has_the_metrics_that_are_listed_as_its_own() -> None:
    """In the source of the pinned release, by name and kind."""
    import importlib.util

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
