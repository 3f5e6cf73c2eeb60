"""The chart's pods as podman takes them: what it does not know is replaced, all else stays."""

from pathlib import Path

import pytest
from support.chart.helm_chart import containers, needs_helm, rendered
from support.chart.pods_on_loopback import components
from support.images.podman_pods import podman_pod

pytestmark = needs_helm


@pytest.mark.parametrize("component", ["router", "prefill", "decode"])
def test_a_pod_keeps_its_commands_limits_and_confinement(component: str, tmp_path: Path):
    objects = rendered("cpu-demo")
    spec = dict(components(objects))[component]
    variables = {"metadata.name": "p", "status.podIP": "127.0.0.9", "0.0.0.0": "127.0.0.9"}
    pod = podman_pod("p", spec, objects, variables, tmp_path)
    assert pod["spec"]["hostNetwork"]
    paths = {each["name"]: Path(each["hostPath"]["path"]) for each in pod["spec"]["volumes"]}
    for before, after in zip(containers(spec), containers(pod["spec"]), strict=True):
        for kept in ("name", "image", "command", "resources", "securityContext"):
            assert after.get(kept) == before.get(kept)
        args = [word.replace("$(POD_NAME)", "p").replace("$(POD_IP)", "127.0.0.9") for word in before.get("args", ())]
        assert after.get("args", []) == args
        assert not {"livenessProbe", "readinessProbe", "startupProbe", "ports"} & after.keys()
        assert all(each.keys() == {"name", "value"} for each in after["env"])
        mounted = {each["mountPath"]: paths[each["name"]] for each in after["volumeMounts"]}
        assert mounted.keys() == {each["mountPath"] for each in before["volumeMounts"]}
        assert all(path.exists() and path.is_relative_to(tmp_path) for path in mounted.values())
        if config := mounted.get("/etc/prelude/cluster.yaml"):
            assert "0.0.0.0" not in config.read_text()
            assert mounted["/var/lib/prelude"] == tmp_path / "r-prelude-store"  # a claim, which all pods share
            assert mounted["/tmp"].is_relative_to(tmp_path / "p")
