"""Renders the chart with Helm's own code, and finds objects in what comes out."""

import functools
import importlib.util
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.chart import helm_process
from support.chart.helm_process import CHART

from cluster.config.load import load_cluster_config
from cluster.config.schema import ClusterConfig
from process.lifetime import die_with_parent

ROOT = Path(__file__).parents[3]
SCENARIOS = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
RELEASE, NAMESPACE = "r", "ns"
FULLNAME = "r-prelude"

Object = dict[str, Any]

needs_helm = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None,
    reason="Helm is not installed, so the chart is NOT TESTED: `make setup-dev` installs requirements/dev.txt",
)


@functools.cache
def _helm() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), die_with_parent)


def scenario_values(scenario: str) -> dict[str, Any]:
    return yaml.safe_load((CHART / "ci" / f"{scenario}-values.yaml").read_text())


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """As `helm -f VALUES -f CHANGES` merges them."""
    found = dict(values)
    for key, value in changes.items():
        inner = found.get(key)
        found[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found


def lint(values: dict[str, Any], kube_version: str) -> dict[str, Any]:
    return _helm().submit(helm_process.lint, values, kube_version).result()


def texts(values: dict[str, Any]) -> dict[str, str]:
    """What each template renders to. Raises Refused."""
    return _helm().submit(helm_process.render, values, RELEASE, NAMESPACE).result()


def refusal(values: dict[str, Any], api_server: str) -> str:
    """Why Helm refuses the values in a cluster."""
    return _helm().submit(helm_process.refusal, values, RELEASE, NAMESPACE, api_server).result()


def render(values: dict[str, Any]) -> list[Object]:
    """Every object. Raises Refused."""
    found = []
    for name, text in texts(values).items():
        if not name.endswith(".txt"):
            found += [each for each in yaml.safe_load_all(text) if each]
    return found


@functools.cache
def _rendered(scenario: str) -> str:
    return json.dumps(render(scenario_values(scenario)))


def rendered(scenario: str) -> list[Object]:
    """The objects of one of `helm/ci`."""
    return json.loads(_rendered(scenario))


def changed(scenario: str, change: dict[str, Any]) -> list[Object]:
    """The objects of one of `helm/ci` with other values. Raises Refused."""
    return render(merged(scenario_values(scenario), change))


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def config_in(objects: list[Object], config_map: str, folder: Path) -> ClusterConfig:
    """The `cluster.yaml` of a ConfigMap, as a process reads it; written into the folder."""
    path = folder / "cluster.yaml"
    path.write_text(named(objects, "ConfigMap", config_map)["data"]["cluster.yaml"])
    return load_cluster_config(path)


def pods(objects: list[Object]) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Name, spec and labels of every pod that a workload makes, and of pods themselves."""
    for each in objects:
        name = f"{each['kind']}/{each['metadata']['name']}"
        if each["kind"] == "Pod":
            yield name, each["spec"], each["metadata"]["labels"]
        elif each["kind"] in ("Deployment", "StatefulSet", "Job"):
            template = each["spec"]["template"]
            yield name, template["spec"], template["metadata"]["labels"]


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def selects(selector: dict[str, Any] | None, labels: dict[str, str]) -> bool:
    """Whether a label selector of Kubernetes matches."""
    if selector is None:
        return False
    if "matchLabels" not in selector and "matchExpressions" not in selector and selector:
        selector = {"matchLabels": selector}  # of a Service
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In", each
        if labels.get(each["key"]) not in each["values"]:
            return False
    return True
