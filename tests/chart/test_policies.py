"""A scan of every pod that the chart makes. What it lets pass is listed, with the reasons."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.chart.custom_resources import strictly_valid
from support.chart.helm_chart import (
    FULLNAME,
    SCENARIOS,
    changed,
    config_in,
    containers,
    named,
    needs_helm,
    of_kind,
    pods,
    rendered,
    selects,
)
from support.observability.dashboards import ALERTS

from cluster.config.workers import ENGINE_METRICS_PATH
from observability.registry import metrics

pytestmark = needs_helm
# Rule, and where it may be broken: scenario, pod (its end) and container.
EXCEPTIONS: dict[tuple[str, str, str], str] = {
    ("host path", "h100-node", ""): "the model is on the node's disk, in this example of one node; mounted read-only",
    ("host network", "rdma-2p6d", "decode-spill"): "an example of the option, for RDMA devices without a CNI plugin",
    ("mutable image tag", "cpu-demo", ""): "a tag of a release; an installation that must repeat gives digests",
    ("mutable image tag", "h100-node", ""): "as above",
    ("mutable image tag", "unified-secret", ""): "as above",
    ("mutable image tag", "trainer", ""): "as above",
    ("no limit of CPU", "", ""): "a throttled scheduler loop stalls every stream; requests share the processors out",
}


def violations(spec: dict[str, Any]) -> Iterator[str]:
    """The rules that a pod breaks, those of Kubernetes' `restricted` profile among them."""
    security = spec.get("securityContext", {})
    if not security.get("runAsNonRoot") or security.get("runAsUser", 0) == 0:
        yield "may be root"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "no seccomp profile"
    for key, rule in (("hostNetwork", "host network"), ("hostPID", "host processes"), ("hostIPC", "host IPC")):
        if spec.get(key):
            yield rule
    if spec.get("automountServiceAccountToken") is not False:
        yield "token of the API server"
    if any("hostPath" in each for each in spec.get("volumes", ())):
        yield "host path"
    for each in containers(spec):
        own, limits = each.get("securityContext", {}), each.get("resources", {}).get("limits", {})
        if own.get("privileged") is not False or own.get("allowPrivilegeEscalation") is not False:
            yield "privilege"
        if not own.get("readOnlyRootFilesystem"):
            yield "writable root"
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            yield "capabilities"
        if own.get("capabilities", {}).get("add"):
            yield "added capabilities"
        if "memory" not in limits:
            yield "no limit of memory"
        if "cpu" not in limits:
            yield "no limit of CPU"
        if "@sha256:" not in each["image"]:
            yield "mutable image tag"
        if each["image"].endswith(":latest") or ":" not in each["image"]:
            yield "latest image"
    for each in spec.get("volumes", ()):
        if "emptyDir" in each and "sizeLimit" not in each["emptyDir"]:
            yield "unlimited scratch"
        if each.get("secret", {}).get("defaultMode", 0o440) != 0o440:
            yield "readable secret"


def excuse(rule: str, scenario: str, pod: str) -> tuple[str, str, str] | None:
    for key in EXCEPTIONS:
        if key[0] == rule and key[1] in ("", scenario) and pod.endswith(key[2]):
            return key
    return None


def test_every_violation_is_an_exception_and_every_exception_is_needed():
    used, wrong = set(), []
    for scenario in SCENARIOS:
        for name, spec, _ in pods(rendered(scenario)):
            for rule in violations(spec):
                found = excuse(rule, scenario, name)
                used.add(found)
                if found is None:
                    wrong.append((scenario, name, rule))
    assert not wrong
    assert used == set(EXCEPTIONS)


def test_the_scan_finds_what_is_wrong():
    bad = {
        "hostNetwork": True,
        "securityContext": {"runAsUser": 0},
        "volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {"path": "/"}}],
        "containers": [
            {"image": "prelude", "securityContext": {"privileged": True, "capabilities": {"add": ["IPC_LOCK"]}}}
        ],
    }
    assert set(violations(bad)) == {
        "may be root", "no seccomp profile", "host network", "token of the API server", "host path", "privilege",
        "writable root", "capabilities", "added capabilities", "no limit of memory", "no limit of CPU",
        "mutable image tag", "latest image", "unlimited scratch",
    }  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
class TestObjects:
    def test_nothing_may_use_the_api_server(self, scenario: str):
        """Discovery by DNS needs no rights, so there are no roles, and no pod has a token."""
        kinds = {each["kind"] for each in rendered(scenario)}
        assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
        for account in of_kind(rendered(scenario), "ServiceAccount"):
            assert account["automountServiceAccountToken"] is False

    def test_accounts_exist(self, scenario: str):
        accounts = {each["metadata"]["name"] for each in of_kind(rendered(scenario), "ServiceAccount")}
        used = {spec["serviceAccountName"] for _, spec, _ in pods(rendered(scenario)) if "serviceAccountName" in spec}
        assert used == accounts

    def test_config_maps_exist(self, scenario: str):
        objects = rendered(scenario)
        maps = {each["metadata"]["name"] for each in of_kind(objects, "ConfigMap")}
        for name, spec, _ in pods(objects):
            for volume in spec.get("volumes", ()):
                if "configMap" in volume:
                    assert volume["configMap"]["name"] in maps, name
            mounted = {each["name"] for part in containers(spec) for each in part["volumeMounts"]}
            volumes = {each["name"] for each in spec["volumes"]}
            if name.startswith("StatefulSet") and scenario in ("rdma-2p6d", "role-changes"):
                volumes.add("cache")  # a claim of each pod
            assert mounted == volumes, name

    def test_selectors_match_one_workload_each(self, scenario: str):
        objects = rendered(scenario)
        labels = {f"{name} {found['app.kubernetes.io/component']}": found for name, _, found in pods(objects)}
        for each in of_kind(objects, "Deployment", "StatefulSet", "PodDisruptionBudget"):
            matched = [name for name, found in labels.items() if selects(each["spec"]["selector"], found)]
            assert len(matched) == 1, each["metadata"]["name"]
        for each in of_kind(objects, "Service"):
            assert any(selects(each["spec"]["selector"], found) for found in labels.values())

    def test_pods_that_are_not_ready_hold_no_drain_up(self, scenario: str):
        for each in of_kind(rendered(scenario), "PodDisruptionBudget"):
            assert each["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow", each["metadata"]["name"]

    def test_scalers_scale_what_has_no_replicas(self, scenario: str):
        objects = rendered(scenario)
        scaled = {
            (each["spec"]["scaleTargetRef"]["kind"], each["spec"]["scaleTargetRef"]["name"])
            for each in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject")
        }
        for each in of_kind(objects, "Deployment", "StatefulSet"):
            is_scaled = (each["kind"], each["metadata"]["name"]) in scaled
            assert is_scaled == ("replicas" not in each["spec"]), each["metadata"]["name"]


@pytest.mark.parametrize(
    ("role", "over", "metric"),
    [
        ("prefill", "sum", "prelude_router_prefill_queue_seconds"),
        ("decode", "max", "prelude_router_decode_load_ratio"),
    ],
)
def test_scalers_see_all_routers_of_their_release(role: str, over: str, metric: str):
    """As docs/placement.md says: each router has a part of the queue, and all of the load. So do alerts."""
    for kind, is_scraped in itertools.product(("keda", "hpa"), (True, False)):
        changes = {"pools": {role: {"main": {"autoscaling": {"kind": kind}}}}}
        changes["monitoring"] = {"podMonitor": {"enabled": is_scraped}}
        scalers = changed("rdma-2p6d", changes)
        # Series have the release's label from the chart's monitors only.
        labels = {"namespace": "ns"} | ({"release": "r"} if is_scraped else {})
        if kind == "keda":
            (scaler,) = [each for each in of_kind(scalers, "ScaledObject") if f"-{role}-" in each["metadata"]["name"]]
            (trigger,) = scaler["spec"]["triggers"]
            matchers = ",".join(f'{name}="{value}"' for name, value in labels.items())
            assert trigger["metadata"]["query"] == f"{over}({metric}{{{matchers}}})"
            # Else KEDA takes routers that are gone for no load.
            assert trigger["metadata"]["ignoreNullValues"] == "false"
        else:
            hpas = of_kind(scalers, "HorizontalPodAutoscaler")
            (scaler,) = [each for each in hpas if f"-{role}-main" in each["metadata"]["name"]]
            (asked,) = scaler["spec"]["metrics"]
            assert asked["external"]["metric"] == {"name": metric, "selector": {"matchLabels": labels}}
    assert any(f"{over} by (namespace, release) ({metric})" in each["expr"] for each in ALERTS)


def test_the_pages_scaler_of_wanted_sizes_is_valid_and_fits_the_chart(tmp_path: Path):
    page = (Path(__file__).parents[2] / "docs/kubernetes.md").read_text()
    (block,) = (each for each in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "ScaledObject" in each)
    scaler = yaml.safe_load(block)
    strictly_valid(scaler, "1.33")
    objects = changed("cpu-demo", {"cluster": {"role_changes": "dry-run"}})
    target = scaler["spec"]["scaleTargetRef"]
    pool = named(objects, target["kind"], target["name"].replace("prelude", FULLNAME, 1))
    (trigger,) = scaler["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    metric, role = re.fullmatch(
        r'max\(avg_over_time\((\w+)\{namespace="prelude",role="(\w+)"\}\[1m\]\)\)', query
    ).groups()
    assert metrics()[metric].labels == ("role",)
    assert pool["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == role
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")  # a worker each
    assert config_in(objects, f"{FULLNAME}-router", tmp_path).role_changes == "dry-run"
    # Workers do not read it: to switch it on restarts none.
    assert pool == named(rendered("cpu-demo"), target["kind"], pool["metadata"]["name"])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_monitors_scrape_ports_that_exist(scenario: str):
    objects = rendered(scenario)
    for monitor in of_kind(objects, "PodMonitor"):
        found = [spec for _, spec, labels in pods(objects) if selects(monitor["spec"]["selector"], labels)]
        assert found
        for spec in found:
            names = {port["name"] for each in spec["containers"] for port in each.get("ports", ())}
            assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} <= names


def test_every_worker_and_its_engine_are_scraped_once():
    """A target is known by its monitor's name, its address and its port's name: engines need a monitor of their own."""
    objects = rendered("h100-node")
    targets = set()
    for monitor in of_kind(objects, "PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        for name, _, labels in pods(objects):
            if selects(monitor["spec"]["selector"], labels):
                component = labels["app.kubernetes.io/component"]
                targets.add((component, endpoint["path"]))
                assert FULLNAME in monitor["metadata"]["name"], name
    workers = {(role, path) for role in ("prefill", "decode") for path in ("/metrics", ENGINE_METRICS_PATH)}
    assert targets == workers | {("router", "/metrics")}
    names = [monitor["metadata"]["name"] for monitor in of_kind(objects, "PodMonitor")]
    assert len(set(names)) == len(names) == 3
