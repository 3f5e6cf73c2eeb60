"""The dashboards and rules of the chart as tests read them, and what their queries name."""

import json
from pathlib import Path
from typing import Any

import promql_parser
import yaml

FILES = Path(__file__).parents[3] / "helm" / "files"
RULES = yaml.safe_load((FILES / "rules.yaml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
RECORDED = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
DASHBOARDS: list[dict[str, Any]] = [
    json.loads(path.read_text()) for path in sorted((FILES / "dashboards").glob("*.json"))
]


def runnable(expression: str, window: str = "1m") -> str:
    """A panel's query as Prometheus takes it, with what Grafana replaces replaced."""
    return expression.replace("$__rate_interval", window).replace("$namespace", ".*")


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

    visit(promql_parser.parse(runnable(expression)))
    return found
