"""The cluster of Kubernetes that KUBECONFIG names, by the real helm and kubectl."""

import json
import os
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.chart.helm_chart import Object

IMAGE, IMAGE_0_1_0 = "PRELUDE_CPU_IMAGE", "PRELUDE_CPU_IMAGE_0_1_0"
_LACKING = [f"variable {each}" for each in ("KUBECONFIG", IMAGE) if not os.environ.get(each)]
_LACKING += [f"program {each}" for each in ("helm", "kubectl") if shutil.which(each) is None]
READY_S = 900

# No cluster is taken by chance: nobody has the second variable.
needs_cluster = pytest.mark.skipif(
    bool(_LACKING), reason=f"the chart is NOT TESTED on a cluster, for lack of {', '.join(_LACKING)}"
)
needs_image_0_1_0 = pytest.mark.skipif(
    not os.environ.get(IMAGE_0_1_0), reason=f"the upgrade from 0.1.0 is NOT TESTED, for lack of variable {IMAGE_0_1_0}"
)


def image_values(variable: str = IMAGE) -> dict[str, Any]:
    """Values that name an image of `images/cpu.Dockerfile`, as NAME:TAG, which the cluster's nodes have or can pull."""
    repository, _, tag = os.environ[variable].rpartition(":")
    return {"image": {each: {"repository": repository, "tag": tag} for each in ("router", "worker")}}


class Namespace:
    """One in which pods must satisfy the `restricted` standard. A command that fails fails the test."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder

    def run(self, *words: object, text: str = "") -> str:
        """Standard output of a command, such as `kubectl`, `get`, `pods`."""
        return self.result(*words, text=text).stdout.strip()

    def result(self, *words: object, text: str = "") -> "subprocess.CompletedProcess[str]":
        command = [str(words[0]), f"--namespace={self.name}", *map(str, words[1:])]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=READY_S + 60, check=False)
        if done.returncode:
            state = f"kubectl --namespace={self.name} get pods,events --sort-by=.metadata.creationTimestamp".split()
            found = subprocess.run(state, capture_output=True, text=True, timeout=60, check=False).stdout
            pytest.fail(f"{' '.join(command)}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}\n{found[-4000:]}")
        return done

    def get(self, *words: object) -> list[Object]:
        return json.loads(self.run("kubectl", "get", *words, "--output=json"))["items"]

    def pods(self, component: str) -> list[Object]:
        """Those of the chart that are not ending."""
        found = self.get("pods", "--selector", f"app.kubernetes.io/component={component}")
        return [each for each in found if "deletionTimestamp" not in each["metadata"]]

    def helm(self, command: str, release: str, chart: Path, values: dict[str, Any]) -> None:
        """`install` or `upgrade`, until all pods are ready."""
        file = self._folder / f"{uuid.uuid4().hex}.yaml"
        file.write_text(yaml.safe_dump(values))
        self.run("helm", command, release, chart, "--values", file, "--wait", f"--timeout={READY_S}s")

    def everything(self, *options: str) -> set[str]:
        """What the namespace holds, or by options what `kubectl get` finds, as kind/name, without events."""
        scope = "--namespaced=" + ("false" if options else "true")
        resources = self.run("kubectl", "api-resources", scope, "--verbs=list", "--output=name").split()
        listed = ",".join(each for each in resources if each.partition(".")[0] != "events")
        return set(self.run("kubectl", "get", listed, *options, "--output=name").split())
