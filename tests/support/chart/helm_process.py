"""Calls of Helm's Go library, for a process of their own, apart from pytest's."""

from pathlib import Path
from typing import Any

CHART = Path(__file__).parents[3] / "helm"


class Refused(Exception):
    """Helm refused the values."""


def render(values: dict[str, Any], release: str, namespace: str) -> dict[str, str]:
    """The manifests by template, as `helm template` renders them, its check of the values included. Raises Refused."""
    from helm_python import chart, errors

    try:
        with chart.Chart.load(CHART) as loaded:
            loaded.validate_schema(values)
            return loaded.render(values, name=release, namespace=namespace)
    except errors.HelmError as error:
        raise Refused(str(error)) from None


def lint(values: dict[str, Any], kube_version: str) -> dict[str, Any]:
    """The report of `helm lint --strict`."""
    from helm_python import chart

    return chart.lint(CHART, values, strict=True, kube_version=kube_version)


def refusal(values: dict[str, Any], release: str, namespace: str, api_server: str) -> str:
    """Why `helm install --dry-run=server` fails."""
    from helm_python import config, errors

    with config.Config(kube_apiserver=api_server, namespace=namespace, storage_driver="memory") as cluster:
        try:
            cluster.install(CHART, release, values, namespace=namespace, dry_run="server")
        except errors.HelmError as error:
            return str(error)
    return ""
