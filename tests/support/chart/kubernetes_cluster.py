"""The cluster of Kubernetes that KUBECONFIG names, by the real helm and kubectl."""

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.chart.helm_chart import ROOT, Object

IMAGE, IMAGE_0_1_0 = "PRELUDE_CPU_IMAGE", "PRELUDE_CPU_IMAGE_0_1_0"
_LACKING = [f"variable {each}" for each in ("KUBECONFIG", IMAGE) if not os.environ.get(each)]
_LACKING += [f"program {each}" for each in ("helm", "kubectl") if shutil.which(each) is None]
READY_S = 900

# A cluster is never taken by chance: nobody has the second variable.
needs_cluster = pytest.mark.skipif(
    bool(_LACKING), reason=f"the chart is NOT TESTED on a cluster: it lacks {', '.join(_LACKING)} (docs/kubernetes.md)"
)
needs_image_0_1_0 = pytest.mark.skipif(
    not os.environ.get(IMAGE_0_1_0), reason=f"the upgrade from 0.1.0 is NOT TESTED: it lacks variable {IMAGE_0_1_0}"
)


def image_values(variable: str = IMAGE) -> dict[str, Any]:
    """Values that name the image of `images/cpu.Dockerfile` which the cluster's nodes have or can pull."""
    repository, _, tag = os.environ[variable].rpartition(":")
    image = {"repository": repository, "tag": tag}
    return {"image": {"router": image, "worker": image}}


class Namespace:
    """A namespace in which pods must satisfy the `restricted` standard. Commands that fail raise AssertionError."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder

    def run(self, *words: object, text: str = "", timeout_s: float = READY_S + 60) -> str:
        """Standard output of a command, such as `kubectl`, `get`, `pods`."""
        return self.result(*words, text=text, timeout_s=timeout_s).stdout.strip()

    def result(
        self, *words: object, text: str = "", timeout_s: float = READY_S + 60
    ) -> "subprocess.CompletedProcess[str]":
        command = [str(words[0]), f"--namespace={self.name}", *map(str, words[1:])]
        done = subprocess.run(
            command, input=text, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            pytest.fail(f"{' '.join(command)}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}\n{self._state()}")
        return done

    def get(self, *words: object) -> list[Object]:
        return json.loads(self.run("kubectl", "get", *words, "--output=json"))["items"]

    def pods(self, component: str, release: str) -> list[Object]:
        """Those that are not ending, by name."""
        labels = f"app.kubernetes.io/component={component},app.kubernetes.io/instance={release}"
        found = [each for each in self.get("pods", "--selector", labels) if "deletionTimestamp" not in each["metadata"]]
        return sorted(found, key=lambda each: each["metadata"]["name"])

    def helm(self, command: str, release: str, chart: Path, values: dict[str, Any]) -> None:
        """`install` or `upgrade`, until all pods are ready."""
        file = self._folder / f"{uuid.uuid4().hex}.yaml"
        file.write_text(yaml.safe_dump(values))
        self.run("helm", command, release, chart, "--values", file, "--wait", f"--timeout={READY_S}s")

    def everything(self) -> set[str]:
        """What the namespace holds, as kind/name, without events."""
        resources = self.run("kubectl", "api-resources", "--namespaced", "--verbs=list", "--output=name").split()
        listed = [each for each in resources if each.partition(".")[0] != "events"]
        return set(self.run("kubectl", "get", ",".join(listed), "--output=name").split())

    def labelled(self, release: str) -> set[str]:
        """What has a release's label and is in no namespace."""
        resources = self.run("kubectl", "api-resources", "--namespaced=false", "--verbs=list", "--output=name").split()
        selector = f"app.kubernetes.io/instance={release}"
        return set(self.run("kubectl", "get", ",".join(resources), "--selector", selector, "--output=name").split())

    def _state(self) -> str:
        """For a person who reads why a command failed."""
        words = ["kubectl", f"--namespace={self.name}", "get", "pods,events", "--sort-by=.metadata.creationTimestamp"]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout[-4000:]


@contextmanager
def namespace(folder: Path) -> Iterator[Namespace]:
    found = Namespace(f"prelude-test-{uuid.uuid4().hex[:8]}", folder)
    levels = [f"pod-security.kubernetes.io/{each}=restricted" for each in ("enforce", "warn")]
    found.run("kubectl", "create", "namespace", found.name)
    try:
        found.run("kubectl", "label", "namespace", found.name, *levels)
        yield found
    finally:
        found.run("kubectl", "delete", "namespace", found.name, "--wait")
