"""Runs Helm's Go library in a process of its own, apart from pytest's. One JSON line per call."""

import json
import sys
from pathlib import Path
from typing import Any

from helm_python import chart, config
from helm_python.errors import HelmError

CHART = Path(__file__).parents[3] / "helm"


def render(values: dict[str, Any], release: str, namespace: str) -> dict[str, str]:
    """The manifests by template, as `helm template` renders them, its check of the values included."""
    with chart.Chart.load(CHART) as loaded:
        loaded.validate_schema(values)
        return loaded.render(values, name=release, namespace=namespace)


def lint(values: dict[str, Any], kube_version: str) -> dict[str, Any]:
    """The report of `helm lint --strict`."""
    return chart.lint(CHART, values, strict=True, kube_version=kube_version)


def refusal(values: dict[str, Any], release: str, namespace: str, api_server: str) -> str:
    """Why `helm install --dry-run=server` fails."""
    with config.Config(kube_apiserver=api_server, namespace=namespace, storage_driver="memory") as cluster:
        try:
            cluster.install(CHART, release, values, namespace=namespace, dry_run="server")
        except HelmError as error:
            return str(error)
    return ""


def main() -> None:
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"result": {"render": render, "lint": lint, "refusal": refusal}[call["name"]](**call["arguments"])}
        except HelmError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
