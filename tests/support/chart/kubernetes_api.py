"""A double of Kubernetes' API, as far as Helm needs it: objects are stored, listed, watched, patched and deleted.

Jobs and pods of hooks succeed at once. It proves nothing about a real one: there is no admission, validation,
controller or garbage collection here, and nobody's rights are checked.
"""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

# Group and version, and the kinds that the chart has, with their plural.
KINDS: dict[str, dict[str, str]] = {
    "v1": {
        "ConfigMap": "configmaps", "Secret": "secrets", "Service": "services", "ServiceAccount": "serviceaccounts",
        "Pod": "pods", "PersistentVolumeClaim": "persistentvolumeclaims", "Namespace": "namespaces",
    },
    "apps/v1": {"Deployment": "deployments", "StatefulSet": "statefulsets", "ReplicaSet": "replicasets"},
    "batch/v1": {"Job": "jobs"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies", "Ingress": "ingresses"},
    "autoscaling/v2": {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
    "monitoring.coreos.com/v1": {"PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"},
}  # fmt: skip
_WATCH_S = 30.0
Key = tuple[str, str, str]  # namespace, plural, name


class KubernetesApi:
    """The objects, and what was done to them in order."""

    def __init__(self) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self.log: list[tuple[str, str, str]] = []  # verb, kind, name
        self.failing_hooks: set[str] = set()  # jobs that fail, by name
        self.url = ""
        self._version = 0
        self._changed = threading.Condition()

    def of_kind(self, kind: str) -> dict[str, dict[str, Any]]:
        """Objects by name."""
        with self._changed:
            return {name: each for (_, _, name), each in self.objects.items() if each["kind"] == kind}

    def put(self, verb: str, key: Key, obj: dict[str, Any]) -> dict[str, Any]:
        """Store an object, with what the API server and controllers add to it."""
        with self._changed:
            self._version += 1
            old = self.objects.get(key, {}).get("metadata", {})
            generation = old.get("generation", 0) + 1
            obj["metadata"] |= {
                "namespace": key[0],
                "uid": old.get("uid", f"uid-{self._version}"),
                "resourceVersion": str(self._version),
                "generation": generation,
                "creationTimestamp": "2026-01-01T00:00:00Z",
            }
            if status := self._status(obj):
                obj["status"] = {**status, "observedGeneration": generation}
            self.objects[key] = obj
            self.log.append((verb, obj["kind"], key[2]))
            self._changed.notify_all()
            return obj

    def _status(self, obj: dict[str, Any]) -> dict[str, Any]:
        if obj["kind"] == "Job":
            failed = obj["metadata"]["name"] in self.failing_hooks
            condition = {"type": "Failed" if failed else "Complete", "status": "True", "reason": "Done", "message": ""}
            return {"conditions": [condition], "failed": int(failed), "succeeded": int(not failed)}
        return {"phase": "Succeeded"} if obj["kind"] == "Pod" else {}

    def delete(self, key: Key) -> bool:
        with self._changed:
            found = self.objects.pop(key, None)
            if found is not None:
                self._version += 1
                self.log.append(("delete", found["kind"], key[2]))
                self._changed.notify_all()
            return found is not None

    def list(self, namespace: str, plural: str, query: dict[str, str]) -> dict[str, Any]:
        with self._changed:
            found = [
                each
                for (where, what, name), each in self.objects.items()
                if what == plural and (not namespace or where == namespace) and _selected(each, name, query)
            ]
            return {"metadata": {"resourceVersion": str(self._version)}, "items": found}


def _selected(obj: dict[str, Any], name: str, query: dict[str, str]) -> bool:
    labels = obj["metadata"].get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = term.replace("==", "=").partition("=")
        if labels.get(key) != value:
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        key, _, value = term.replace("==", "=").partition("=")
        if key == "metadata.name" and name != value:
            return False
    return True


def _merged(old: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    found = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = _merged(found.get(key), value)
    return found


def _root(group_version: str) -> str:
    return f"apis/{group_version}" if "/" in group_version else f"api/{group_version}"


def _openapi(path: str) -> dict[str, Any]:
    """Says that the server validates fields, so that Helm does not do it from definitions, which are not here."""
    if path == "/openapi/v3":
        return {"paths": {_root(each): {"serverRelativeURL": f"/openapi/v3/{_root(each)}"} for each in KINDS}}
    paths = {}
    (name,) = [each for each in KINDS if f"/openapi/v3/{_root(each)}" == path]
    group, _, version = name.rpartition("/")
    for kind, plural in KINDS[name].items():
        paths[f"/{_root(name)}/namespaces/{{namespace}}/{plural}/{{name}}"] = {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                "responses": {},
                "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind},
            }
        }
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.34.0"}, "paths": paths}


def _discovery(path: str) -> dict[str, Any] | None:
    groups = [each for each in KINDS if "/" in each]
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path.startswith("/openapi/v3"):
        return _openapi(path)
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        found = []
        for each in groups:
            version = {"groupVersion": each, "version": each.partition("/")[2]}
            found.append({"name": each.partition("/")[0], "versions": [version], "preferredVersion": version})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}
    name = path.removeprefix("/apis/") if path.startswith("/apis/") else path.removeprefix("/api/")
    if name in KINDS:
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        resources = [
            {
                "name": plural,
                "singularName": kind.lower(),
                "namespaced": kind != "Namespace",
                "kind": kind,
                "verbs": verbs,
            }
            for kind, plural in KINDS[name].items()
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": resources}
    return None


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: KubernetesApi

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _not_found(self, name: str = "") -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self._answer(404, {**status, "message": f"{name or self.path} not found", "details": {"name": name}})

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        text = self.rfile.read(length)
        body = yaml.safe_load(text) if length and self.command != "DELETE" else None
        if (found := _discovery(parts.path)) is not None:
            self._answer(200, found)
            return
        words = parts.path.strip("/").split("/")
        words = words[2:] if words[0] == "api" else words[3:]
        prefix = parts.path.strip("/").split("/")
        group = prefix[1] if prefix[0] == "api" else "/".join(prefix[1:3])
        namespace = ""
        if words[:1] == ["namespaces"] and len(words) > 2:
            namespace, words = words[1], words[2:]
        kinds = {plural: kind for kind, plural in KINDS.get(group, {}).items()}
        if not words or words[0] not in kinds:
            self._not_found()
            return
        plural, name = words[0], words[1] if len(words) > 1 else ""
        key = (namespace, plural, name)
        if self.command == "GET" and not name:
            if query.get("watch") in ("1", "true"):
                self._watch(namespace, plural, query, {"kind": kinds[plural], "apiVersion": group})
            else:
                self._answer(
                    200,
                    {"kind": f"{kinds[plural]}List", "apiVersion": group, **self.api.list(namespace, plural, query)},
                )
        elif self.command == "POST":
            self._answer(201, self.api.put("create", (namespace, plural, body["metadata"]["name"]), body))
        elif self.command == "PATCH" and "apply-patch" in self.headers["Content-Type"]:
            self._answer(200, self.api.put("apply", key, body))
        elif key not in self.api.objects:
            self._not_found(name)
        elif self.command == "GET":
            self._answer(200, self.api.objects[key])
        elif self.command == "PUT":
            self._answer(200, self.api.put("update", key, body))
        elif self.command == "PATCH":
            self._answer(200, self.api.put("patch", key, _merged(self.api.objects[key], body)))
        else:
            self.api.delete(key)
            self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _watch(self, namespace: str, plural: str, query: dict[str, str], kind: dict[str, str]) -> None:
        """What is there, then what changes, as a stream of events."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        seen: dict[str, dict[str, Any]] = {}
        since = int(query.get("resourceVersion") or 0)
        until = time.monotonic() + _WATCH_S
        wants_initial = query.get("sendInitialEvents") == "true"
        while time.monotonic() < until:
            found = self.api.list(namespace, plural, query)
            now = {each["metadata"]["name"]: each for each in found["items"]}
            events = [{"type": "DELETED", "object": seen[name]} for name in seen.keys() - now.keys()]
            for name, each in now.items():
                version = int(each["metadata"]["resourceVersion"])
                if seen.get(name) is not each and (name in seen or version > since):
                    events.append({"type": "MODIFIED" if name in seen else "ADDED", "object": each})
            seen = now
            if wants_initial:  # and to be told where they end
                mark = {**found["metadata"], "annotations": {"k8s.io/initial-events-end": "true"}}
                events.append({"type": "BOOKMARK", "object": {**kind, "metadata": mark}})
                wants_initial = False
            try:
                for event in events:
                    text = json.dumps(event).encode() + b"\n"
                    self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
                self.wfile.flush()
            except OSError:
                return
            with self.api._changed:
                self.api._changed.wait(0.2)
        self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def log_message(self, *_: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True


@contextmanager
def kubernetes_api() -> Iterator[KubernetesApi]:
    """A server of the API on loopback."""
    api = KubernetesApi()
    handler = type("Handler", (_Handler,), {"api": api})
    with _Server(("127.0.0.1", 0), handler) as server:
        api.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield api
        server.shutdown()
