"""Every scenario of `helm/ci` passes Helm's lint and Kubernetes' schemas; values that are wrong are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.chart.custom_resources import SPECS, complaints, strictly_valid
from support.chart.helm_chart import (
    SCENARIOS,
    changed,
    lint,
    merged,
    needs_helm,
    of_kind,
    pods,
    render,
    rendered,
    scenario_values,
    texts,
)
from support.chart.helm_process import Refused

pytestmark = needs_helm
ROOT = Path(__file__).parents[2]
KUBERNETES = ("1.29", "1.37")  # the oldest that the chart takes, to the newest


@pytest.mark.parametrize("kube_version", ["v1.29.0", "v1.37.0"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_lint(scenario: str, kube_version: str):
    report = lint(scenario_values(scenario), kube_version)
    assert not report["errors"]
    assert [each for each in report["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_are_strictly_valid(version: str):
    for scenario in SCENARIOS:
        for obj in rendered(scenario):
            strictly_valid(obj, version)


def test_every_custom_resource_is_rendered_somewhere():
    values = {"monitoring": {"prometheusRule": {"enabled": True}}}
    found = [each for scenario in SCENARIOS for each in changed(scenario, values)]
    assert SPECS.keys() <= {(each["apiVersion"], each["kind"]) for each in found}
    for each in found:
        if (each["apiVersion"], each["kind"]) in SPECS:
            strictly_valid(each, KUBERNETES[0])


def test_fields_of_custom_resources_are_checked():
    (scaler, *_) = of_kind(rendered("rdma-2p6d"), "ScaledObject")
    found = complaints({**scaler, "spec": {"maxReplicas": 3, "maxReplicaCount": "3", "triggers": [{"type": "cpu"}]}})
    places = {each.partition(":")[0] for each in found}
    assert places == {"$", "$.maxReplicaCount", "$.triggers[0].type", "$.triggers[0]"}
    assert any("'maxReplicas' was unexpected" in each for each in found)
    assert any("'scaleTargetRef' is a required property" in each for each in found)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_names_are_unique_and_short_enough(scenario: str):
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered(scenario)]
    assert len(names) == len(set(names))
    assert max(len(name) for _, name in names) <= 52  # a StatefulSet's, whose revisions are labels


def test_longest_names_fit():
    pool = "p" * 14
    values = merged(scenario_values("cpu-demo"), {"fullnameOverride": "f" * 60})
    values["pools"] = {"prefill": {pool: {}}, "decode": {pool: {}}}
    (stateful,) = of_kind(render(values), "StatefulSet")
    assert len(stateful["metadata"]["name"]) <= 52


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_who_is_sent_to_a_pools_node_is_let_in(scenario: str):
    selected = [spec for _, spec, _ in pods(rendered(scenario)) if "nodeSelector" in spec]
    for pool in [spec for _, spec, labels in pods(rendered(scenario)) if "prelude.pool" in labels]:
        for spec in selected:
            if spec["nodeSelector"] == pool.get("nodeSelector"):
                assert spec.get("tolerations") == pool.get("tolerations"), spec["containers"][0]["name"]


# Value, and what the message must name.
BY_SCHEMA: list[tuple[dict[str, Any], str]] = [
    ({"replicaCount": 3}, "replicaCount"),
    ({"router": {"resources": {"limit": {}}}}, "/router/resources"),
    ({"pools": {"prefil": {}}}, "/pools"),
    ({"pools": {"prefill": {"Main": {}}}}, "'Main' does not match"),
    ({"pools": {"prefill": {"main": {"tensor_parallel": 2}}}}, "/pools/prefill/main"),
    ({"ports": {"router": {"http": 70000}}}, "/ports/router/http"),
    ({"ports": {"trainer": {"http": 65535}}}, "/ports/trainer/http"),  # the next one is the metrics'
    ({"trainer": {"rowTokens": 100}}, "/trainer/rowTokens"),
    ({"trainer": {"replicas": 2}}, "/trainer"),
    ({"image": {"router": {"digest": "latest"}}}, "/image/router/digest"),
    ({"cluster": {"workers": {}}}, "/cluster"),
    ({"cluster": {"router": {"host": "127.0.0.1"}}}, "/cluster/router"),
    ({"cluster": {"residency": {"host_bytes": "8Gi"}}}, "/cluster/residency/host_bytes"),
    ({"podSecurityContext": {"runAsNonRoot": False}}, "/podSecurityContext/runAsNonRoot"),
    ({"podSecurityContext": {"runAsUser": 0}}, "/podSecurityContext/runAsUser"),
    ({"integrity": {"trustedKeys": {"a": "-----BEGIN PRIVATE KEY-----"}}}, "/integrity/trustedKeys/a"),
]


@pytest.mark.parametrize(("change", "place"), BY_SCHEMA, ids=[place.strip("/") for _, place in BY_SCHEMA])
def test_schema_refuses(change: dict[str, Any], place: str):
    with pytest.raises(Refused, match=place):
        changed("h100-node", change)


BY_TEMPLATE: list[tuple[str, dict[str, Any], str]] = [
    ("h100-node", {"pools": {"decode": {"main": {"enabled": False}}}}, "pools.decode: there is none"),
    ("h100-node", {"model": {"name": ""}}, "model.name"),
    ("h100-node", {"model": {"volume": None}}, "model.volume"),
    ("h100-node", {"model": {"mountPath": "/models/llama"}}, "is not below model.mountPath, /models/llama, where"),
    ("h100-node", {"fullnameOverride": "70b"}, "fullnameOverride: Services would be called 70b"),
    ("h100-node", {"store": {"url": ""}}, "store.url"),
    ("h100-node", {"store": {"url": "file:///x"}}, "store.claim.enabled"),
    ("h100-node", {"catalog": {"existingSecret": ""}}, "catalog.existingSecret"),
    ("h100-node", {"catalog": {"url": "postgresql://u:p@h/d", "existingSecret": ""}}, "has a password"),
    ("h100-node", {"tls": {"issuer": {"name": ""}}}, "tls.issuer.name"),
    ("h100-node", {"allowPlainText": False}, "router.tls.secretName"),
    ("h100-node", {"ports": {"kv": {"first": 60000, "last": 50000}}}, "ports.kv: first is 60000 and last is 50000"),
    ("h100-node", {"ports": {"router": {"http": 8001}}}, "ports.router: one process opens all of them"),
    (
        "rdma-2p6d",
        {"pools": {"decode": {"main": {"autoscaling": {"minReplicas": 20}}}}},
        "pools.decode.main.autoscaling: minReplicas is 20, and maxReplicas 12",
    ),
    ("h100-node", {"cluster": {"router": {"auth": None}}}, "cluster.router.auth"),
    ("h100-node", {"pools": {"prefill": {"main": {"autoscaling": {"kind": "keda"}}}}}, "keda.prometheusAddress"),
    (
        "h100-node",
        {"pools": {"prefill": {"main": {"kind": "Deployment", "diskCache": {"persistent": True}}}}},
        "needs kind StatefulSet",
    ),
    ("h100-node", {"router": {"resources": {"limits": {"memory": "2G"}}}}, "router.resources: give memory in Mi or Gi"),
    (
        "h100-node",
        {"toolbox": {"resources": {"limits": {"memory": "2G"}}}},
        "toolbox.resources: give memory in Mi or Gi",
    ),
    ("cpu-demo", {"allowPlainText": False}, "tls.mode"),
    ("cpu-demo", {"router": {"replicas": 2}}, "SQLite is for router.replicas 1"),
    ("cpu-demo", {"pools": {"prefill": None, "decode": None}}, "pools: give at least"),
    ("unified-secret", {"pools": {"unified": {"main": {"tlsSecret": ""}}}}, "pools.unified.main.tlsSecret"),
    ("unified-secret", {"pools": {"unified": {"main": {"kind": "Deployment"}}}}, "need names that are known"),
    ("unified-secret", {"tls": {"secrets": {"operator": ""}}}, "tls.secrets.operator"),
    ("rdma-2p6d", {"router": {"tls": {"certManager": {"dnsNames": None}}}}, "router.tls.certManager"),
    ("rdma-2p6d", {"networkPolicy": {"hostNetworkNodes": []}}, "hostNetworkNodes: .* of pools.decode.spill"),
    ("rdma-2p6d", {"networkPolicy": {"monitoring": []}}, "networkPolicy.monitoring: nobody could scrape"),
    ("rdma-2p6d", {"router": {"gateway": {"name": ""}}}, "router.gateway.name"),
]


@pytest.mark.parametrize(("scenario", "change", "message"), BY_TEMPLATE, ids=[each[2] for each in BY_TEMPLATE])
def test_templates_refuse(scenario: str, change: dict[str, Any], message: str):
    with pytest.raises(Refused, match=message):
        changed(scenario, change)


def test_what_is_off_renders_nothing():
    off = {
        "networkPolicy": {"enabled": False},
        "router": {"pdb": {"enabled": False}, "ingress": {"enabled": False}},
        "poolDefaults": {"pdb": {"enabled": False}},
        "catalog": {"migrate": {"enabled": False}},
        "toolbox": {"enabled": False},
        "monitoring": {each: {"enabled": False} for each in ("podMonitor", "prometheusRule", "dashboards")},
        "tests": {"adapter": ""},
    }
    kinds = {each["kind"] for each in changed("h100-node", off)}
    assert kinds == {"ConfigMap", "Deployment", "Service", "ServiceAccount", "StatefulSet"}


def test_notes_warn_of_what_is_open():
    notes = {scenario: texts(scenario_values(scenario))["prelude/templates/NOTES.txt"] for scenario in SCENARIOS}
    for scenario in SCENARIOS:
        values = scenario_values(scenario)
        assert ("allowAnonymous is set" in notes[scenario]) == values.get("allowAnonymous", False)
        assert ("allowPlainText is set" in notes[scenario]) == values.get("allowPlainText", False)
    assert "exec deploy/r-prelude-toolbox -- prelude keys create" in notes["h100-node"]
    blocked = merged(scenario_values("rdma-2p6d"), {"networkPolicy": {"extraEgress": []}})
    notes["no-collector"] = texts(blocked)["prelude/templates/NOTES.txt"]
    warned = {name for name, text in notes.items() if "no network policy lets pods reach http" in text}
    assert warned == {"no-collector"}
    assert "helm -n ns test r" in notes["cpu-demo"]


def test_dashboards_and_rules_reach_the_cluster_as_they_are():
    on = {each: {"enabled": True} for each in ("prometheusRule", "dashboards")}
    objects = changed("cpu-demo", {"monitoring": on})
    files = ROOT / "helm" / "files"
    configs = {name: text for each in of_kind(objects, "ConfigMap") for name, text in each["data"].items()}
    for path in (files / "dashboards").glob("*.json"):
        assert json.loads(configs[path.name]) == json.loads(path.read_text())
    (rule,) = of_kind(objects, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((files / "rules.yaml").read_text())
