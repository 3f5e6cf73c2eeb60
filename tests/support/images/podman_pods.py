"""What the chart renders, as pods that `podman kube play` takes.

Podman 4.3 knows no StatefulSets, no `fieldRef` of an address, no variables in `args`, no `fsGroup` and no `subPath`. It
probes by curl, which the images lack. All pods share the host's network, so that each has an address of loopback.
"""

import copy
from pathlib import Path
from typing import Any

from support.chart.helm_chart import Object, containers, named


def podman_pod(
    name: str, spec: dict[str, Any], objects: list[Object], variables: dict[str, str], folder: Path
) -> Object:
    """A pod with folders below `folder` as its volumes, those of claims shared with other pods.

    `variables` replaces words in ConfigMaps and the environment, and has what `fieldRef` stands for, such as
    {"status.podIP": "127.0.0.11"}.
    """
    spec = copy.deepcopy(spec)
    kept = {key: spec[key] for key in ("initContainers", "containers", "restartPolicy") if key in spec}
    user = {key: spec["securityContext"][key] for key in ("runAsUser", "runAsGroup", "runAsNonRoot")}
    sources = {each["name"]: _source(each, name, objects, variables, folder) for each in spec.get("volumes", ())}
    volumes: dict[str, Path] = {}
    for container in containers(spec):
        for unknown in ("livenessProbe", "readinessProbe", "startupProbe", "ports"):
            container.pop(unknown, None)
        for each in container.get("env", ()):
            if reference := each.pop("valueFrom", None):
                each["value"] = variables[reference["fieldRef"]["fieldPath"]]
            each["value"] = _replaced(each["value"], variables)
            args = [word.replace(f"$({each['name']})", each["value"]) for word in container.get("args", ())]
            container["args"] = args
        for mount in container.get("volumeMounts", ()):
            source = sources[mount["name"]] / mount.pop("subPath", "")
            mount["name"] = f"v{len(volumes)}"
            volumes[mount["name"]] = source
    kept["volumes"] = [{"name": each, "hostPath": {"path": str(path)}} for each, path in volumes.items()]
    kept |= {"hostNetwork": True, "securityContext": user}
    kept_after = {"io.podman.annotations.init.container.type": "always"}  # podman fails to remove some
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "annotations": kept_after}, "spec": kept}


def _source(volume: dict[str, Any], pod: str, objects: list[Object], variables: dict[str, str], folder: Path) -> Path:
    if claim := volume.get("persistentVolumeClaim"):
        source = folder / claim["claimName"]
    else:
        source = folder / pod / volume["name"]
    source.mkdir(parents=True, exist_ok=True)
    source.chmod(0o777)  # for the pod's user, whom `fsGroup` would let in
    if config := volume.get("configMap"):
        for file, text in named(objects, "ConfigMap", config["name"])["data"].items():
            (source / file).write_text(_replaced(text, variables))
    return source


def _replaced(text: str, variables: dict[str, str]) -> str:
    for word, meant in variables.items():
        text = text.replace(word, meant)
    return text
