"""What users' scripts and dashboards rely on keeps its name: public_names_0.1.0.json has what a release promised.

More may come. What goes, or changes, needs an entry in CHANGELOG.md.
"""

import argparse
import importlib
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

import adapters
import cluster
import prefill_worker
import router
from adapters.errors import AdapterError
from cli.main import _parser
from cluster.agent.worker_metrics import WorkerMetrics
from prefill_worker.residency.metrics import ResidencyMetrics
from router.errors import RouterError
from router.metrics import Metrics

NAMES = json.loads(Path(__file__).with_name("public_names_0.1.0.json").read_text())


def commands_of(parser: argparse.ArgumentParser, name: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """Options and positional arguments of every command."""
    found: dict[str, set[str]] = {" ".join(name): set()}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                found |= commands_of(command, (*name, word))
        elif not isinstance(action, argparse._HelpAction):
            found[" ".join(name)].add("/".join(action.option_strings) or action.dest)
    return found


def test_commands_keep_their_options():
    commands = commands_of(_parser())
    for command, options in NAMES["cli"].items():
        assert set(options) <= commands[command], command


def metrics_of(registry: CollectorRegistry) -> dict[str, str]:
    return {metric.name: metric.type for metric in registry.collect()}


def labels_of(registry: CollectorRegistry) -> dict[str, set[str]]:
    """Those that a metric is declared with, or, of one that is made at each scrape, those of its samples."""
    found: dict[str, set[str]] = {}
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase):
            found[collector._name] = set(collector._labelnames)
        else:
            for family in collector.collect():
                found[family.name] = {label for sample in family.samples for label in sample.labels} - {"le"}
    return found


def worker_registry() -> CollectorRegistry:
    metrics = WorkerMetrics("w", "prefill")
    ResidencyMetrics(metrics.registry, "w", "prefill")
    return metrics.registry


@pytest.mark.parametrize(("process", "make"), [("router", lambda: Metrics().registry), ("worker", worker_registry)])
def test_metrics_keep_their_names_and_labels(process: str, make: Callable[[], CollectorRegistry]):
    """Labels exactly: queries that add up series by the others would count a new one's values as one."""
    registry = make()
    assert NAMES["metrics"][process].items() <= metrics_of(registry).items()
    labels = labels_of(registry)
    for name, then in NAMES["labels"][process].items():
        assert labels[name] == set(then), name


def subclasses(error: type[Any]) -> set[type[Any]]:
    return {error}.union(*(subclasses(each) for each in error.__subclasses__()))


def test_errors_keep_their_codes():
    for package in (adapters, cluster, prefill_worker, router):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith("errors"):
                importlib.import_module(module.name)
    codes: dict[str, list[dict[str, Any]]] = {}
    for error in subclasses(AdapterError) | subclasses(RouterError):
        answer = {"http_status": error.http_status, "retryable": error.retryable}
        codes.setdefault(error.code, []).append(answer)
    for code, answer in NAMES["errors"].items():
        assert answer in codes.get(code, []), code
