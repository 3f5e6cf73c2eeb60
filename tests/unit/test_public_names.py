"""What users' scripts and dashboards rely on keeps its name: public_names_0.1.0.json is what version 0.1.0 had.

More may come. What goes, or changes, needs an entry in CHANGELOG.md and a new file here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

import adapters
import cluster
import prefill_worker
import router
from adapters.errors import AdapterError
from cli.main import _parser
from cluster.agent.worker_metrics import WorkerMetrics
from prefill_worker.residency.metrics import ResidencyMetrics, TierFigures
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


def test_the_router_keeps_its_metrics():
    assert NAMES["metrics"]["router"].items() <= metrics_of(Metrics().registry).items()


def test_workers_keep_their_metrics():
    metrics = WorkerMetrics("w", "prefill")
    tiers = {tier: TierFigures(1, 2, 3) for tier in ("host", "disk")}
    ResidencyMetrics(metrics.registry, "w", "prefill", 8).watch(
        lambda: tiers, lambda: (0, 0, 0), lambda: 0, lambda: 0, lambda _: [], list
    )
    assert NAMES["metrics"]["worker"].items() <= metrics_of(metrics.registry).items()


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
