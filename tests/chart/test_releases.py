"""Install, test, upgrade, roll back and uninstall, by Helm's own code, on a double of Kubernetes' API."""

from __future__ import annotations

import pytest
from support.chart.helm_chart import Refused, merged, needs_helm, of_kind, release, rendered, scenario_values
from support.chart.kubernetes_api import KubernetesApi, kubernetes_api

pytestmark = [needs_helm, pytest.mark.slow]
SCENARIO = "h100-node"
ROUTER, MIGRATE, PREFILL = "r-prelude-router", "r-prelude-migrate", "r-prelude-prefill-main"


def test_a_releases_life():
    values = scenario_values(SCENARIO)
    more = merged(values, {"router": {"replicas": 5}, "toolbox": {"enabled": False}})
    with kubernetes_api() as api:
        release("install", api.url, values=values)
        expected = {
            (each["kind"], each["metadata"]["name"])
            for each in rendered(SCENARIO)
            if "helm.sh/hook" not in each["metadata"].get("annotations", {})
        }
        assert made(api) == expected
        assert position(api, "Job", MIGRATE) < position(api, "Deployment", ROUTER)  # before any router
        assert MIGRATE not in api.of_kind("Job")  # and removed when it has succeeded
        assert router_replicas(api) == 2

        release("test", api.url)
        assert api.of_kind("Pod").keys() == {"r-prelude-test"}

        api.log.clear()
        release("upgrade", api.url, values=more)
        assert position(api, "Job", MIGRATE) < position(api, "Deployment", ROUTER)
        assert router_replicas(api) == 5
        assert "r-prelude-toolbox" not in api.of_kind("Deployment")

        release("rollback", api.url, version=1)
        assert router_replicas(api) == 2
        assert "r-prelude-toolbox" in api.of_kind("Deployment")
        assert len(release("history", api.url)) == 3

        release("uninstall", api.url)
        assert made(api) == set()


def test_a_migration_that_fails_leaves_the_routers_alone():
    values = scenario_values(SCENARIO)
    with kubernetes_api() as api:
        release("install", api.url, values=values)
        before = api.of_kind("Deployment")[ROUTER]
        api.failing_hooks.add(MIGRATE)
        with pytest.raises(Refused, match=MIGRATE):
            release("upgrade", api.url, values=merged(values, {"router": {"replicas": 5}}))
        assert api.of_kind("Deployment")[ROUTER] is before


def test_uninstalling_keeps_the_store():
    with kubernetes_api() as api:
        release("install", api.url, values=scenario_values("cpu-demo"))
        assert "r-prelude-store" in api.of_kind("PersistentVolumeClaim")
        release("uninstall", api.url)
        assert made(api) == {("PersistentVolumeClaim", "r-prelude-store")}


def made(api: KubernetesApi) -> set[tuple[str, str]]:
    """What is there, without Helm's own records and what hooks leave."""
    return {
        (each["kind"], name)
        for (_, _, name), each in api.objects.items()
        if "helm.sh/hook" not in each["metadata"].get("annotations", {}) and not name.startswith("sh.helm.release")
    }


def position(api: KubernetesApi, kind: str, name: str) -> int:
    (first, *_) = [number for number, (_, *found) in enumerate(api.log) if found == [kind, name]]
    return first


def router_replicas(api: KubernetesApi) -> int:
    return api.of_kind("Deployment")[ROUTER]["spec"]["replicas"]


def test_every_kind_of_the_scenario_is_one_that_the_double_knows():
    from support.chart.kubernetes_api import KINDS

    known = {(version, kind) for version, kinds in KINDS.items() for kind in kinds}
    assert {(each["apiVersion"], each["kind"]) for each in rendered(SCENARIO)} <= known
    assert of_kind(rendered(SCENARIO), "PodMonitor")
