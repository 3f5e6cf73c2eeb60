"""Runs Helm's Go library in a process of its own, apart from pytest's. One JSON line per call."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from helm_python import chart
from helm_python.config import Config
from helm_python.errors import HelmError

CHART = Path(__file__).parents[3] / "helm"


def render(values: dict[str, Any], release: str, namespace: str, is_upgrade: bool = False) -> dict[str, str]:
    """The manifests by template, as `helm template` renders them, its check of the values included."""
    with chart.Chart.load(CHART) as loaded:
        loaded.validate_schema(values)
        return loaded.render(
            values, name=release, namespace=namespace, is_install=not is_upgrade, is_upgrade=is_upgrade
        )


def lint(values: dict[str, Any], kube_version: str) -> dict[str, Any]:
    """The report of `helm lint --strict`."""
    return chart.lint(CHART, values, strict=True, kube_version=kube_version)


def release(action: str, api: str, namespace: str, name: str, **options: Any) -> Any:
    """`helm install`, `upgrade`, `rollback`, `uninstall`, `test` or `history` on a cluster. No output of manifests."""
    config = _config(api, namespace)
    if action in ("install", "upgrade"):
        with chart.Chart.load(CHART) as loaded:
            getattr(config, action)(loaded, name, namespace=namespace, timeout=60, wait="hookOnly", **options)
        return None
    found = getattr(config, action)(name, **options)
    return found if action == "history" else None


@functools.cache
def _config(api: str, namespace: str) -> Config:
    """Keeps releases in memory: Helm sends Secrets as protobuf, which the double of the API does not read."""
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "double",
        "clusters": [{"name": "double", "cluster": {"server": api}}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "double", "context": {"cluster": "double", "user": "nobody", "namespace": namespace}}],
    }
    return Config(kubeconfig_content=json.dumps(kubeconfig), namespace=namespace, storage_driver="memory")


def main() -> None:
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"result": {"render": render, "lint": lint, "release": release}[call["name"]](**call["arguments"])}
        except HelmError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
