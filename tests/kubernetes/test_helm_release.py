"""The chart on a real cluster: what its API server takes, and the life of a release (`make test-kind`)."""

import json
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.chart import load_client
from support.chart.custom_resources import SPECS
from support.chart.helm_chart import CHART, ROOT, SCENARIOS, merged, scenario_values
from support.chart.kubernetes_cluster import (
    IMAGE,
    IMAGE_0_1_0,
    Namespace,
    image_values,
    needs_cluster,
    needs_image_0_1_0,
)
from support.clusters.certificates import of_changing_workers
from support.waiting import wait_until

pytestmark = [needs_cluster, pytest.mark.long, pytest.mark.timeout(3600)]
RELEASE, FULLNAME = "demo", "demo-prelude"
CLAIM = f"persistentvolumeclaim/{FULLNAME}-store"
DECODE = f"deployment/{FULLNAME}-decode-main"
RELEASE_0_1_0 = "ce1df67af4e8a153db9af8a238d484ab3a09b307"
SMALL = {"poolDefaults": {"cpu": "250m", "memoryGiB": 2}, "router": {"resources": {"requests": {"cpu": "100m"}}}}
# Scenarios whose values need more than the `restricted` standard allows (docs/kubernetes.md), and what that is.
UNRESTRICTED = {"h100-node": "hostPath", "rdma-2p6d": "host namespaces", "unified-secret": "nfs"}
CONNECT = """import socket, sys; socket.setdefaulttimeout(5)
print(socket.socket().connect_ex((sys.argv[1], int(sys.argv[2]))))"""


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Namespace]:
    found = Namespace(f"prelude-test-{uuid.uuid4().hex[:8]}", tmp_path)
    levels = [f"pod-security.kubernetes.io/{each}=restricted" for each in ("enforce", "warn")]
    found.run("kubectl", "create", "namespace", found.name)
    try:
        found.run("kubectl", "label", "namespace", found.name, *levels)
        yield found
    finally:
        found.run("kubectl", "delete", "namespace", found.name, "--wait")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_api_server_takes_what_is_rendered(scenario: str, space: Namespace):
    """All but custom resources whose definitions the cluster lacks; those are named."""
    text = space.run("helm", "template", RELEASE, CHART, "--values", CHART / "ci" / f"{scenario}-values.yaml")
    objects = [each for each in yaml.safe_load_all(text) if each]
    resources = space.run("kubectl", "api-resources", "--no-headers")
    served = set(re.findall(r"(\S+) +(?:true|false) +(\S+)", resources))
    known = [each for each in objects if (each["apiVersion"], each["kind"]) in served]
    unknown = {(each["apiVersion"], each["kind"]) for each in objects} - served
    assert unknown <= SPECS.keys()
    print("NOT TESTED, as the cluster does not know them:", *[kind for _, kind in unknown] or ["nothing"])
    manifests = yaml.safe_dump_all(known)
    done = space.result("kubectl", "create", "--dry-run=server", "--validate=strict", "-f", "-", text=manifests)
    assert len(done.stdout.splitlines()) == len(known)
    warnings = [line for line in done.stderr.splitlines() if line.startswith("Warning:")]
    assert bool(warnings) == (scenario in UNRESTRICTED), warnings
    assert all(re.search(f"violate PodSecurity .*{UNRESTRICTED[scenario]}", each) for each in warnings), warnings


def test_a_release_from_install_to_uninstall(space: Namespace):
    two_decode = {"pools": {"decode": {"main": {"replicas": 2}}}, **SMALL}
    values = merged(merged(scenario_values("cpu-demo"), two_decode), image_values())
    space.helm("install", RELEASE, CHART, values)
    assert "sha256:" in space.run("helm", "test", RELEASE, "--logs")
    client = Client(space)
    _probe_policies(space)
    client.waits_for_answers()
    decode, others = _names(space, "decode"), _names(space, "prefill") | _names(space, "router")

    changed = merged(values, {"pools": {"decode": {"main": {"engine": {"max_running_requests": 24}}}}})
    space.helm("upgrade", RELEASE, CHART, changed)
    space.run("kubectl", "rollout", "status", DECODE)
    assert "max_running_requests: 24" in _config(space)
    assert not decode & _names(space, "decode")
    assert others == _names(space, "prefill") | _names(space, "router")  # which read no changed value
    for pod in _names(space, "decode"):
        space.run("kubectl", "delete", "pod", pod)
        space.run("kubectl", "rollout", "status", DECODE)
        client.waits_for_answers()
    print(f"Of {client.stops()} requests during a rollout and the deletion of two pods none failed")

    space.run("helm", "rollback", RELEASE, "1", "--wait", "--timeout=900s")
    space.run("kubectl", "rollout", "status", DECODE)
    assert "max_running_requests: 24" not in _config(space)
    assert "sha256:" in space.run("helm", "test", RELEASE, "--logs")
    space.run("helm", "uninstall", RELEASE, "--wait")
    space.run("kubectl", "delete", "pod", Client.NAME)
    wait_until(lambda: {each for each in space.everything() if RELEASE in each} == {CLAIM}, 300)  # with the adapters
    assert space.everything(f"--selector=app.kubernetes.io/instance={RELEASE}") == set()  # outside of namespaces


def test_pods_change_their_role_under_load(space: Namespace, tmp_path: Path):
    """With TLS, a prefill pod and the decode pod exchange roles, answer alone, and have their own again as new pods."""
    pods = [f"{FULLNAME}-{each}" for each in ("prefill-main-0", "prefill-main-1", "decode-main-0")]
    other, to_decode, to_prefill = pods
    of_changing_workers(tmp_path, pods)
    files = [f"--from-file={each}" for each in (tmp_path / "certs").iterdir() if each.name != "ca.key"]
    space.run("kubectl", "create", "secret", "generic", "certs", *files)
    pools = {"prefill": {"replicas": 2, "tlsSecret": "certs"}, "decode": {"kind": "StatefulSet", "tlsSecret": "certs"}}
    changes = {
        "cluster": {"role_changes": "manual"},
        "pools": {role: {"main": pool} for role, pool in pools.items()},
        "tls": {"mode": "secret", "secrets": {"router": "certs", "operator": "certs"}},
        "toolbox": {"enabled": True},
    }
    values = merged(merged(scenario_values("cpu-demo"), merged(SMALL, changes)), image_values())
    space.helm("install", RELEASE, CHART, values)
    client = Client(space)
    client.waits_for_answers()
    print(_workers(space, "set-role", "decode", to_decode))
    client.waits_for_answers()
    print(_workers(space, "set-role", "prefill", to_prefill))
    assert _roles(space) == {other: "prefill", to_prefill: "prefill", to_decode: "decode"}
    _workers(space, "drain", other)
    client.waits_for_answers()
    _workers(space, "undrain", other)
    for pod in (other, to_prefill, to_decode):  # of each, another pod has the role at each time
        space.run("kubectl", "delete", "pod", pod)
        for role in pools:
            space.run("kubectl", "rollout", "status", f"statefulset/{FULLNAME}-{role}-main")
        client.waits_for_answers()
    assert _roles(space) == {other: "prefill", to_decode: "prefill", to_prefill: "decode"}
    print(f"Of {client.stops()} requests during two changes of role and the deletion of three pods none failed")


@needs_image_0_1_0
def test_an_upgrade_from_0_1_0_keeps_catalog_and_adapters(space: Namespace, tmp_path: Path):
    archive = subprocess.run(["git", "archive", RELEASE_0_1_0, "helm"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", tmp_path], input=archive.stdout, check=True)
    charts = {IMAGE_0_1_0: tmp_path / "helm", IMAGE: CHART}
    values = {
        variable: merged(
            yaml.safe_load((chart / "ci" / "cpu-demo-values.yaml").read_text()),
            {**SMALL, **image_values(variable), "tests": {"adapter": "kept"}},
        )
        for variable, chart in charts.items()
    }
    space.helm("install", RELEASE, charts[IMAGE_0_1_0], values[IMAGE_0_1_0])
    (router,) = _names(space, "router")
    imports = ("prelude", "adapters", "import", "kept", "/models/demo/adapters/a2", "--json")
    (revision,) = set(re.findall(r"sha256:\w+", space.run("kubectl", "exec", router, "--", *imports)))
    claims = [each["metadata"]["uid"] for each in space.get("persistentvolumeclaims")]
    for variable in (IMAGE, IMAGE_0_1_0):
        if variable == IMAGE:
            space.helm("upgrade", RELEASE, CHART, values[IMAGE])
        else:
            space.run("helm", "rollback", RELEASE, "--wait", "--timeout=900s")
        for component in ("router", "prefill", "decode"):
            (pod,) = space.pods(component)
            assert {each["image"] for each in pod["spec"]["containers"]} == {os.environ[variable]}
        assert f"kept {revision}" in space.run("helm", "test", RELEASE, "--logs")
        assert claims == [each["metadata"]["uid"] for each in space.get("persistentvolumeclaims")]
    space.run("helm", "uninstall", RELEASE, "--wait")


def _names(space: Namespace, component: str) -> set[str]:
    return {each["metadata"]["name"] for each in space.pods(component)}


def _workers(space: Namespace, *words: str) -> str:
    return space.run("kubectl", "exec", f"deployment/{FULLNAME}-toolbox", "--", "prelude", "workers", *words)


def _roles(space: Namespace) -> dict[str, str]:
    """Of the workers, all of which are ready."""
    workers = json.loads(_workers(space, "list", "--json"))["workers"]
    assert {each["state"] for each in workers.values()} == {"ready"}, workers
    return {name: each["role"] for name, each in workers.items()}


def _config(space: Namespace) -> str:
    (found,) = [each for each in space.get("configmaps") if each["metadata"]["name"] == f"{FULLNAME}-decode-main"]
    return found["data"]["cluster.yaml"]


def _probe_policies(space: Namespace) -> None:
    """What they must let through comes through; whether the cluster enforces them is up to it, and printed."""
    (router,), (prefill,) = space.pods("router"), space.pods("prefill")
    assert {each["metadata"]["name"] for each in space.get("networkpolicies")} == {
        f"{FULLNAME}-{each}" for each in ("default-deny", "router", "prefill", "decode", "test")
    }
    found = [
        space.run("kubectl", "exec", Client.NAME, "--", "python", "-c", CONNECT, pod["status"]["podIP"], port)
        for pod, port in ((router, 8000), (router, 8001), (prefill, 9001))
    ]
    assert found[0] == "0", found
    assert (found[1] == "0") == (found[2] == "0"), found
    print("NetworkPolicies are", "NOT ENFORCED by this cluster" if "0" in found[1:] else "enforced by this cluster")


class Client:
    """A pod that asks the router without a pause."""

    NAME = "client"

    def __init__(self, space: Namespace) -> None:
        self._space = space
        source = Path(load_client.__file__).read_text()
        container = {
            "name": "c",
            "image": os.environ[IMAGE],
            "command": ["python", "-c", source, f"http://{FULLNAME}:8000/v1/chat/completions", "/tmp/stop"],
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
        user = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
        spec = {"containers": [container], "restartPolicy": "Never", "securityContext": user}
        spec |= {"volumes": [{"name": "tmp", "emptyDir": {}}], "automountServiceAccountToken": False}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": self.NAME}, "spec": spec}
        space.run("kubectl", "create", "-f", "-", text=json.dumps(pod))
        space.run("kubectl", "wait", f"pod/{self.NAME}", "--for=condition=Ready", "--timeout=300s")

    def waits_for_answers(self) -> None:
        """Until 20 more requests have ended."""
        command = ["kubectl", f"--namespace={self._space.name}", "logs", "--follow", "--since=1s", self.NAME]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as log:
            assert log.stdout
            lines = [log.stdout.readline() for _ in range(20)]
            log.kill()
        assert all(lines), "the client has ended"

    def stops(self) -> int:
        """The number of its requests, none of which failed."""
        self._space.run("kubectl", "exec", self.NAME, "--", "touch", "/tmp/stop")
        phase = "--for=jsonpath={.status.phase}=Succeeded"
        self._space.run("kubectl", "wait", f"pod/{self.NAME}", phase, "--timeout=600s")
        printed = self._space.run("kubectl", "logs", self.NAME)
        assert load_client.wrong_answers(printed) == []
        return len(printed.splitlines())
