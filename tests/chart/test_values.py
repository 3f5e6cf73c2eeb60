"""Values have the effect that they claim to have: none is ignored, or becomes what a cluster would refuse."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.chart.api_server import api_server
from support.chart.helm_chart import (
    CHART,
    FULLNAME,
    NAMESPACE,
    Object,
    changed,
    config_in,
    containers,
    merged,
    named,
    needs_helm,
    of_kind,
    pods,
    refusal,
    render,
    rendered,
    scenario_values,
)
from support.chart.helm_process import Refused
from support.observability.dashboards import DASHBOARDS, RULES

pytestmark = needs_helm


def environment(objects: list[Object], kind: str, name: str) -> dict[str, Any]:
    """Of the workload's container. A name that is there twice is refused by server-side apply."""
    found = containers(named(objects, kind, name)["spec"]["template"]["spec"])[0]["env"]
    assert len({each["name"] for each in found}) == len(found)
    return {each["name"]: each.get("value") for each in found}


def test_variables_are_as_they_were_written():
    given = {"NCCL_BUFFSIZE": 8388608, "SHARE": 0.25, "VERBOSE": True, "TEXT": "4e+06", "HOME": "/tmp/home"}
    objects = changed("h100-node", {"router": {"env": given}, "pools": {"decode": {"main": {"env": given}}}})
    wanted = {"NCCL_BUFFSIZE": "8388608", "SHARE": "0.25", "VERBOSE": "true", "TEXT": "4e+06", "HOME": "/tmp/home"}
    for name in ("r-prelude-router", "r-prelude-decode-main"):
        assert wanted.items() <= environment(objects, "Deployment", name).items()
    assert environment(rendered("h100-node"), "Deployment", "r-prelude-router")["HOME"] == "/tmp"


def sections(values: dict[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield (*place, name)
            yield from sections(value, (*place, name))


@pytest.mark.parametrize("scenario", ["h100-node", "trainer"])
def test_a_section_whose_lines_are_all_comments_is_refused_by_name_or_harmless(scenario: str):
    """Helm then removes the chart's defaults, too."""
    refused: set[str] = set()
    for place in sections(yaml.safe_load((CHART / "values.yaml").read_text())):
        change: Any = None
        for name in reversed(place):
            change = {name: change}
        try:
            changed(scenario, change)
        except Refused as error:
            text = str(error)
            assert f"missing property '{place[-1]}'" in text or ".".join(place) in text, place
            refused.add(".".join(place))
    assert {"router", "router.tls", "poolDefaults.pdb", "ports.kv", "model.volume"} <= refused


def test_the_demo_requests_what_it_says():
    """The scheduler counts a pod's init container where that has more than the others."""
    scales, totals = {"m": 0.001, "Mi": 2**-10, "Gi": 1.0}, {"cpu": 0.0, "memory": 0.0}
    for name, spec, _ in pods(rendered("cpu-demo")):
        for resource in totals if not name.startswith("Pod/") else ():
            texts = [each["resources"]["requests"][resource] for each in containers(spec)]
            pairs = [re.findall(r"(\d+)(\D+)", each)[0] for each in texts]
            totals[resource] += max(float(number) * scales[unit] for number, unit in pairs)
    said = re.search(r"needs ([\d.]+) CPUs and (\d+) GiB", (CHART / "ci" / "cpu-demo-values.yaml").read_text())
    assert said
    assert totals["cpu"] == float(said[1])
    assert int(said[2]) - 1 < totals["memory"] <= int(said[2])


@pytest.mark.parametrize("name", ["POD_NAME", "POD_IP", "PRELUDE_CATALOG_URL", "PRELUDE_SIGNING_KEY"])
def test_variables_of_the_chart_are_not_given_twice(name: str):
    with pytest.raises(Refused, match=name):
        changed("h100-node", {"router": {"env": {name: "x"}}})
    used = {each["name"] for _, spec, _ in pods(rendered("h100-node")) for each in containers(spec)[0].get("env", ())}
    assert name in used


@pytest.mark.parametrize("change", [{}, {"listenHost": "::"}])
def test_routers_listen_on_the_given_addresses(change: dict[str, str]):
    objects = changed("h100-node", {"router": change})
    router = yaml.safe_load(named(objects, "ConfigMap", "r-prelude-router")["data"]["cluster.yaml"])["router"]
    assert {router["host"], router["admin"]["host"]} == {change.get("listenHost", "0.0.0.0")}


@pytest.mark.parametrize("off", [False, "off"])
def test_off_is_read_from_a_file_and_from_set(off: Any, tmp_path: Path):
    """`--set cluster.role_changes=off` gives the word, where YAML has a boolean."""
    objects = changed("role-changes", {"cluster": {"role_changes": off}})
    assert config_in(objects, f"{FULLNAME}-router", tmp_path).role_changes == "off"
    for role in ("prefill", "decode"):
        config_map = named(objects, "ConfigMap", f"{FULLNAME}-{role}-main")
        assert "role_changes" not in yaml.safe_load(config_map["data"]["cluster.yaml"])


def test_what_is_named_with_false_is_not_used():
    objects = changed("h100-node", {"image": {"pullSecrets": {"yes": True, "no": False}}})
    assert {str(spec["imagePullSecrets"]) for _, spec, _ in pods(objects)} == {"[{'name': 'yes'}]"}
    none = changed("h100-node", {"image": {"pullSecrets": {"no": False}}})
    assert not any("imagePullSecrets" in spec for _, spec, _ in pods(none))
    names = {"router": {"tls": {"certManager": {"dnsNames": {"old.example.org": False}}}}}
    (certificate,) = of_kind(changed("rdma-2p6d", names), "Certificate")
    assert certificate["spec"]["dnsNames"] == ["llm.example.org"]
    names["router"]["tls"]["certManager"]["dnsNames"]["llm.example.org"] = False
    with pytest.raises(Refused, match=r"router\.tls\.certManager"):
        changed("rdma-2p6d", names)


def test_names_are_resolved_by_pods_and_by_a_cache_on_the_node():
    """A peer of a policy has selectors or a block: the API server refuses both in one."""
    cache = {"cidr": "169.254.20.10/32"}
    selectors = yaml.safe_load((CHART / "values.yaml").read_text())["networkPolicy"]["dns"]
    for dns, peers in (
        ({}, [selectors]),
        ({"ipBlock": cache}, [selectors, {"ipBlock": cache}]),
        ({"ipBlock": cache, "podSelector": None, "namespaceSelector": None}, [{"ipBlock": cache}]),
    ):
        policies = of_kind(changed("h100-node", {"networkPolicy": {"dns": dns}}), "NetworkPolicy")
        rules = [rule for each in policies for rule in each["spec"].get("egress", ()) if rule["ports"][0]["port"] == 53]
        assert [rule["to"] for rule in rules] == [peers] * 2  # of all pods, and of the migration


def test_the_migration_reaches_the_database_that_this_release_names():
    """Its job runs before an upgrade changes any policy: one of its own has to come first, and names to be resolved."""
    moved = {"networkPolicy": {"catalog": {"to": [{"ipBlock": {"cidr": "10.20.0.6/32"}}], "port": 6432}}}
    objects = changed("rdma-2p6d", moved)
    policy, job = named(objects, "NetworkPolicy", "r-prelude-migrate"), named(objects, "Job", "r-prelude-migrate")
    hooks = [each["metadata"]["annotations"] for each in (policy, job)]
    assert hooks[0]["helm.sh/hook"] == hooks[1]["helm.sh/hook"]
    assert int(hooks[0]["helm.sh/hook-weight"]) < int(hooks[1]["helm.sh/hook-weight"])
    ports = [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]]
    assert ports == [53, 53, 6432]


def test_uninstalling_keeps_the_store():
    claim = named(rendered("cpu-demo"), "PersistentVolumeClaim", "r-prelude-store")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


@pytest.mark.parametrize(
    ("endpoint", "given", "port"),
    [
        ("", None, 443),
        ("http://minio.storage:9000", None, 9000),
        ("http://minio.storage", None, 80),
        ("https://[fd00::1]:9443/", None, 9443),
        ("https://objects.example.org:9000", 9001, 9001),
    ],
)
def test_the_stores_port_is_that_of_its_url(endpoint: str, given: int | None, port: int):
    change = {"store": {"s3EndpointUrl": endpoint}, "networkPolicy": {"store": {"port": given}}}
    policy = named(changed("h100-node", change), "NetworkPolicy", "r-prelude-prefill")
    assert policy["spec"]["egress"][-1] == {"ports": [{"port": port, "protocol": "TCP"}]}


def test_whatever_reads_the_store_reaches_who_issues_its_credentials():
    issuer = {"to": [{"ipBlock": {"cidr": "10.9.9.9/32"}}], "ports": [{"port": 443, "protocol": "TCP"}]}
    objects = changed("h100-node", {"networkPolicy": {"extraEgress": [issuer]}})
    reaching = {
        each["metadata"]["name"]
        for each in of_kind(objects, "NetworkPolicy")
        if issuer in each["spec"].get("egress", ())
    }
    assert reaching == {f"r-prelude-{each}" for each in ("router", "toolbox", "prefill", "decode")}


def test_a_disk_cache_of_all_pools_is_one_of_those_that_have_adapters():
    objects = changed("h100-node", {"poolDefaults": {"diskCache": {"persistent": True}}})
    (prefill,) = of_kind(objects, "StatefulSet")
    assert prefill["spec"]["volumeClaimTemplates"][0]["metadata"]["name"] == "cache"
    decode = named(objects, "Deployment", "r-prelude-decode-main")["spec"]["template"]["spec"]
    assert "cache" not in {each["name"] for each in decode["volumes"]}


def test_jobs_have_names_that_alerts_and_dashboards_know():
    """Whatever the release is called: without `job`, the operator names it after the monitor."""
    trainer = {"enabled": True, "keySecret": "key"}
    objects = changed("h100-node", {"fullnameOverride": "llm", "nameOverride": "llm", "trainer": trainer})
    jobs = set()
    for monitor in of_kind(objects, "PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        labels = {each["targetLabel"]: each["replacement"] for each in endpoint["relabelings"]}
        assert labels.pop("release") == "r"
        jobs.add(labels.pop("job"))
        assert labels == {}
    assert jobs == {
        "prelude-router",
        "prelude-workers",
        "prelude-engines",
        "prelude-trainer",
    }  # those of docs/observability.md
    queries = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    queries += [query["expr"] for each in DASHBOARDS for panel in each["panels"] for query in panel["targets"]]
    patterns = {found for query in queries for found in re.findall(r'job=~"([^"]+)"', query)}
    assert patterns
    assert all(re.fullmatch(pattern, job) for pattern in patterns for job in jobs)


def test_alerts_lead_to_the_pages_that_values_name():
    on = {"enabled": True, "runbooks": "https://wiki.example.org/prelude/"}
    (rules,) = of_kind(changed("h100-node", {"monitoring": {"prometheusRule": on}}), "PrometheusRule")
    links = [
        rule["annotations"]["runbook_url"]
        for group in rules["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert len(links) > 10
    for link in links:
        page = re.fullmatch(r"https://wiki\.example\.org/prelude/([\w-]+\.md)#\w+", link)
        assert page, link
        assert (CHART.parent / "docs" / "operations" / page[1]).exists()


def test_the_runbooks_ask_where_processes_listen():
    """Routers on every address of their pods, where port-forward arrives; agents on the pod's own."""
    page = (CHART.parent / "docs" / "operations" / "README.md").read_text()
    ports = yaml.safe_load((CHART / "values.yaml").read_text())["ports"]
    assert f"port-forward deploy/prelude-router {ports['router']['admin']} " in page
    prefill, decode, unified = (ports[role]["metrics"] for role in ("prefill", "decode", "unified"))
    assert f"http://$POD_IP:{prefill}/ready'   # of a prefill worker; decode: {decode}, unified: {unified}\n" in page
    objects = changed("h100-node", {"fullnameOverride": "prelude"})
    assert {"prelude-router", "prelude-toolbox"} <= {
        each["metadata"]["name"] for each in of_kind(objects, "Deployment")
    }


def test_the_page_makes_every_secret_of_its_example():
    page = (CHART.parent / "docs" / "kubernetes.md").read_text()
    made = dict(re.findall(r"create secret generic (\S+) (--from-\S+)", page))
    used: dict[str, set[str]] = {}
    for _, spec, _ in pods(rendered("h100-node")):
        for each in containers(spec):
            for source in each.get("envFrom", ()):
                used.setdefault(source["secretRef"]["name"], set()).add("AWS_ACCESS_KEY_ID")
            for variable in each.get("env", ()):
                if found := variable.get("valueFrom", {}).get("secretKeyRef"):
                    used.setdefault(found["name"], set()).add(found["key"])
    assert used.keys() == made.keys()
    for name, keys in used.items():
        for key in keys:
            assert made[name].startswith((f"--from-literal={key}=", f"--from-file={key}")), name


@pytest.mark.parametrize("given", [None, "", "true"])
def test_a_storage_class_may_be_the_default_or_none_at_all(given: str | None):
    cache = {"persistent": True, "storageClassName": given}
    change = {"store": {"claim": {"storageClassName": given}}, "pools": {"prefill": {"main": {"diskCache": cache}}}}
    objects = changed("cpu-demo", change)
    (cache_claim,) = named(objects, "StatefulSet", "r-prelude-prefill-main")["spec"]["volumeClaimTemplates"]
    for claim in (named(objects, "PersistentVolumeClaim", "r-prelude-store"), cache_claim):
        assert claim["spec"].get("storageClassName") == given
        assert ("storageClassName" in claim["spec"]) is (given is not None)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_running_pools_disk_cache_is_not_changed(persistent: bool):
    """Kubernetes refuses it in words that name no remedy, after parts of the upgrade have been applied."""
    values = {
        given: merged(scenario_values("cpu-demo"), {"poolDefaults": {"diskCache": {"persistent": given}}})
        for given in (True, False)
    }
    there = named(render(values[persistent]), "StatefulSet", "r-prelude-prefill-main")
    there["metadata"]["namespace"] = NAMESPACE
    with api_server(there) as url:
        refused = refusal(values[not persistent], url)
        assert "pools.prefill.main.diskCache" in refused
        assert ("has no claim, and would have a claim of 2Gi" in refused) is not persistent
        assert ("has a claim of 2Gi, class null, and would have none" in refused) is persistent
        assert "`kubectl -n ns delete statefulset r-prelude-prefill-main --cascade=orphan`" in refused
        assert "diskCache" not in refusal(values[persistent], url)


def test_the_test_leaves_nothing_and_names_the_adapters_tenant():
    objects = rendered("cpu-demo")
    for kind in ("ConfigMap", "Pod"):
        annotations = named(objects, kind, "r-prelude-test")["metadata"]["annotations"]
        assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
    with pytest.raises(Refused, match=r"tests\.adapter: legal has no tenant"):
        changed("h100-node", {"tests": {"adapter": "legal"}})
