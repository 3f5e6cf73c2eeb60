"""The chart on a real cluster: what its API server takes, and the life of a release (`make test-kind`)."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.chart.helm_chart import CHART, ROOT, SCENARIOS, merged, scenario_values
from support.chart.kubernetes_cluster import (
    IMAGE,
    IMAGE_0_1_0,
    Namespace,
    image_values,
    namespace,
    needs_cluster,
    needs_image_0_1_0,
)
from support.waiting import wait_until

pytestmark = [needs_cluster, pytest.mark.long, pytest.mark.timeout(3600)]
RELEASE, FULLNAME = "demo", "demo-prelude"
CLAIM = f"persistentvolumeclaim/{FULLNAME}-store"
DECODE = f"deployment/{FULLNAME}-decode-main"
RELEASE_0_1_0 = "ce1df67af4e8a153db9af8a238d484ab3a09b307"
SMALL = {"poolDefaults": {"cpu": "250m", "memoryGiB": 2}, "router": {"resources": {"requests": {"cpu": "100m"}}}}
TWO_DECODE = {"pools": {"decode": {"main": {"replicas": 2}}}}
# Values that need more than the `restricted` standard allows, as docs/kubernetes.md says, and what that is.
UNRESTRICTED = {"h100-node": "hostPath", "rdma-2p6d": "host namespaces", "unified-secret": "nfs"}
# Streams and whole answers of two adapters, until somebody makes /tmp/stop. One line for each request.
CLIENT = """
import json, os, sys, threading, urllib.request
def ask(number):
    body = {"model": "demo", "adapter": f"a{number % 2}", "max_tokens": 16, "stream": number > 1,
            "messages": [{"role": "user", "content": f"Hello {number}"}]}
    request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        text = answer.read().decode()
    is_whole = text.endswith("data: [DONE]\\n\\n") if number > 1 else "usage" in json.loads(text)
    return "" if is_whole and '"error"' not in text else text[-500:]
def work(number):
    while not os.path.exists("/tmp/stop"):
        try:
            wrong = ask(number)
        except Exception as error:
            wrong = f"{error!r} {error.read()[:500] if hasattr(error, 'read') else ''}"
        os.write(1, (json.dumps(wrong) + "\\n").encode())  # at once, as four threads write
for number in range(4):
    threading.Thread(target=work, args=(number,)).start()
"""
REACHES = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
    print("yes")
except OSError as error:
    print(error)
"""
# One request with an adapter, to the router of this pod: prints the revision that has made the answer.
ASKS = """
import json, sys, urllib.request
body = {"model": "demo", "adapter": sys.argv[1], "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
headers = {"Content-Type": "application/json", "Host": sys.argv[2]}
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(), headers)
print(urllib.request.urlopen(request, timeout=300).headers["x-prelude-revision"])
"""
OF_EVERY_NAMESPACE = {"configmap/kube-root-ca.crt", "serviceaccount/default"}


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Namespace]:
    with namespace(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def dry_space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    with namespace(tmp_path_factory.mktemp("dry")) as found:
        yield found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_api_server_takes_what_is_rendered(scenario: str, dry_space: Namespace):
    """All but custom resources whose definitions the cluster lacks; those are named."""
    values = CHART / "ci" / f"{scenario}-values.yaml"
    text = dry_space.run("helm", "template", RELEASE, CHART, "--values", values)
    objects = [each for each in yaml.safe_load_all(text) if each]
    resources = dry_space.run("kubectl", "api-resources", "--no-headers")
    served = set(re.findall(r"(\S+) +(?:true|false) +(\S+)", resources))
    known = [each for each in objects if (each["apiVersion"], each["kind"]) in served]
    unknown = {each["kind"] for each in objects if each not in known}
    if unknown:
        print(f"NOT TESTED, since the cluster does not know them: {', '.join(sorted(unknown))}")
    assert not unknown & {"Deployment", "StatefulSet", "Service", "ConfigMap", "NetworkPolicy", "Pod", "Job"}
    manifests = yaml.safe_dump_all(known)
    done = dry_space.result("kubectl", "create", "--dry-run=server", "--validate=strict", "-f", "-", text=manifests)
    assert len(done.stdout.splitlines()) == len(known)
    warnings = [line for line in done.stderr.splitlines() if line.startswith("Warning:")]
    assert all("would violate PodSecurity" in line for line in warnings), warnings
    reason = UNRESTRICTED.get(scenario)
    assert bool(warnings) == (reason is not None), warnings
    assert all(reason in line for line in warnings if reason), warnings


def test_a_release_from_install_to_uninstall(space: Namespace):
    before = space.everything() | OF_EVERY_NAMESPACE
    values = merged(merged(scenario_values("cpu-demo"), merged(SMALL, TWO_DECODE)), image_values())
    space.helm("install", RELEASE, CHART, values)
    assert "sha256:" in space.run("helm", "test", RELEASE, "--logs")
    client = Client(space)
    _probe_policies(space)
    client.waits_for_answers()
    names = _names(space, "decode"), _names(space, "prefill"), _names(space, "router")

    changed = merged(values, {"pools": {"decode": {"main": {"engine": {"max_running_requests": 24}}}}})
    space.helm("upgrade", RELEASE, CHART, changed)
    space.run("kubectl", "rollout", "status", DECODE)
    assert "max_running_requests: 24" in _config(space)
    assert not names[0] & _names(space, "decode")
    assert (_names(space, "prefill"), _names(space, "router")) == names[1:]  # what reads no changed value stays
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
    client.remove()
    wait_until(lambda: space.everything() <= before | {CLAIM}, 300)
    assert CLAIM in space.everything()  # with the adapters
    assert space.labelled(RELEASE) == set()


@needs_image_0_1_0
def test_an_upgrade_from_0_1_0_keeps_catalog_and_adapters(space: Namespace, tmp_path: Path):
    archive = subprocess.run(["git", "archive", RELEASE_0_1_0, "helm"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", tmp_path], input=archive.stdout, check=True)
    earlier = tmp_path / "helm"
    values = merged(yaml.safe_load((earlier / "ci" / "cpu-demo-values.yaml").read_text()), SMALL)
    space.helm("install", RELEASE, earlier, merged(values, image_values(IMAGE_0_1_0)))
    imported = _in_router(space, "prelude", "adapters", "import", "kept", "/models/demo/adapters/a2", "--json")
    (revision,) = re.findall(r"sha256:\w+", imported)[:1]
    claim = space.get("persistentvolumeclaims")
    for command in ("upgrade", "rollback"):
        if command == "upgrade":
            space.helm("upgrade", RELEASE, CHART, merged(merged(scenario_values("cpu-demo"), SMALL), image_values()))
        else:
            space.run("helm", "rollback", RELEASE, "--wait", "--timeout=900s")
        variable = IMAGE if command == "upgrade" else IMAGE_0_1_0
        for component in ("router", "prefill", "decode"):
            (pod,) = space.pods(component, RELEASE)
            assert {each["image"] for each in pod["spec"]["containers"]} == {os.environ[variable]}
        assert _in_router(space, "python", "-c", ASKS, "kept", FULLNAME) == revision
        assert [each["metadata"]["uid"] for each in space.get("persistentvolumeclaims")] == [
            each["metadata"]["uid"] for each in claim
        ]
    space.run("helm", "uninstall", RELEASE, "--wait")


def _names(space: Namespace, component: str) -> set[str]:
    return {each["metadata"]["name"] for each in space.pods(component, RELEASE)}


def _config(space: Namespace) -> str:
    (found,) = [each for each in space.get("configmaps") if each["metadata"]["name"] == f"{FULLNAME}-decode-main"]
    return found["data"]["cluster.yaml"]


def _in_router(space: Namespace, *words: str) -> str:
    (router,) = _names(space, "router")
    return space.run("kubectl", "exec", router, "--container=router", "--", *words)


def _probe_policies(space: Namespace) -> None:
    """What they must let through comes through; whether the cluster enforces them is up to it, and printed."""
    (router,), (prefill,) = space.pods("router", RELEASE), space.pods("prefill", RELEASE)
    assert {each["metadata"]["name"] for each in space.get("networkpolicies")} == {
        f"{FULLNAME}-{each}" for each in ("default-deny", "router", "prefill", "decode", "test")
    }
    found = [
        space.run("kubectl", "exec", Client.NAME, "--", "python", "-c", REACHES, pod["status"]["podIP"], port)
        for pod, port in ((router, 8000), (router, 8001), (prefill, 9001))
    ]
    assert found[0] == "yes", found
    assert (found[1] == "yes") == (found[2] == "yes"), found
    print("NetworkPolicies are", "NOT ENFORCED by this cluster" if "yes" in found[1:] else "enforced by this cluster")


class Client:
    """A pod that asks the router without a pause."""

    NAME = "client"

    def __init__(self, space: Namespace) -> None:
        self._space = space
        container: dict[str, Any] = {"name": "c", "image": os.environ[IMAGE]}
        container["command"] = ["python", "-c", CLIENT, f"http://{FULLNAME}:8000"]
        container["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]
        container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
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
        ended = [json.loads(line) for line in self._space.run("kubectl", "logs", self.NAME).splitlines()]
        assert [each for each in ended if each] == []
        return len(ended)

    def remove(self) -> None:
        self._space.run("kubectl", "delete", "pod", self.NAME)
