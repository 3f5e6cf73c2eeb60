"""A double of the Kubernetes API server: lists and watches EndpointSlices and Pods that a test sets.

It has no RBAC, no admission and no controllers: it shows what the client does, not what a cluster permits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

TOKEN = "the token of the test"
NAMESPACE = "models"


class KubernetesApiDouble:
    """Objects by kind and name, each with labels; every change has the next version."""

    def __init__(self) -> None:
        self.version = 1000
        self.oldest = 0  # versions below are compacted: 410
        self.is_down = False  # every connection is cut
        self.cuts_watches = False  # every watch is accepted, and cut before its first event
        self.is_silent = False  # nothing is answered
        self.failure: tuple[int, str] | None = None  # status and message of every answer
        self.bookmarks = True
        self.num_lists = self.num_watches = 0
        self.queries: list[dict[str, str]] = []
        self.url = ""
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._events: list[tuple[int, str, str, dict[str, Any]]] = []  # version, kind, type, object
        self._changed = asyncio.Condition()
        self._open: set[asyncio.Transport] = set()

    # ---- the scripted fleet -----------------------------------------------------------------------------------------

    async def set_slice(
        self, name: str, service: str, port: int, endpoints: Iterable[dict[str, Any]], *, kind: str = "IPv4"
    ) -> None:
        await self.put(
            "endpointslices",
            name,
            {"kubernetes.io/service-name": service},
            {"addressType": kind, "endpoints": list(endpoints), "ports": [{"name": "control", "port": port}]},
        )

    async def set_service(self, service: str, addresses: Iterable[str]) -> None:
        """A slice for each host:port, as if every Pod had its own port; the others of the service are deleted."""
        wanted = {f"{service}-{address.replace(':', '-')}": address for address in addresses}
        for name in [name for kind, name in self._objects if kind == "endpointslices" and name not in wanted]:
            if self._objects["endpointslices", name]["metadata"]["labels"]["kubernetes.io/service-name"] == service:
                await self.delete("endpointslices", name)
        for name, address in wanted.items():
            if ("endpointslices", name) not in self._objects:
                host, _, port = address.rpartition(":")
                await self.set_slice(name, service, int(port), [endpoint(host)])

    async def terminate(self, service: str, address: str) -> None:
        """The Pod at host:port begins to end: its endpoint says so before anybody there knows."""
        host, _, port = address.rpartition(":")
        name = f"{service}-{address.replace(':', '-')}"
        await self.set_slice(name, service, int(port), [endpoint(host, ready=False, terminating=True)])

    async def put(self, kind: str, name: str, labels: dict[str, str], body: dict[str, Any]) -> None:
        found = {**body, "metadata": {**body.get("metadata", {}), "name": name, "labels": labels}}
        await self._change(kind, "MODIFIED" if (kind, name) in self._objects else "ADDED", found)

    async def delete(self, kind: str, name: str) -> None:
        await self._change(kind, "DELETED", self._objects[kind, name])

    async def send(self, line: bytes) -> None:
        """Send this to every watch, whatever it is."""
        await self._event(0, "", "", {"line": line.decode()})

    async def compact(self) -> None:
        """Forget every version up to now, and end all watches: they can go on from nowhere."""
        self.oldest = self.version = self.version + 1
        self.cut()

    def cut(self) -> None:
        """Cut every connection."""
        for transport in tuple(self._open):
            transport.abort()

    async def watches(self, count: int) -> None:
        """Wait until so many watches have been begun."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: self.num_watches >= count)

    async def _change(self, kind: str, what: str, found: dict[str, Any]) -> None:
        self.version += 1
        found = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self.version)}}
        name = found["metadata"]["name"]
        if what == "DELETED":
            del self._objects[kind, name]
        else:
            self._objects[kind, name] = found
        await self._event(self.version, kind, what, found)

    async def _event(self, version: int, kind: str, what: str, found: dict[str, Any]) -> None:
        async with self._changed:
            self._events.append((version, kind, what, found))
            self._changed.notify_all()

    # ---- the server -------------------------------------------------------------------------------------------------

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.queries.append({**query, "path": request.path})
        if self.is_down:
            assert request.transport is not None
            request.transport.abort()
        if self.is_silent:
            await asyncio.sleep(3600)
        if self.failure is not None:
            return _status(*self.failure)
        if request.headers.get("authorization", "").lower() != f"bearer {TOKEN}":
            return _status(401, "Unauthorized")
        if request.match_info["namespace"] != NAMESPACE:
            return _status(403, f'cannot list resource in the namespace "{request.match_info["namespace"]}"')
        kind = request.match_info["kind"]
        labels = dict(each.split("=") for each in query.get("labelSelector", "").split(",") if each)
        if query.get("watch") == "true":
            return await self._watch(request, kind, labels, query)
        self.num_lists += 1
        if query.get("continue", "").startswith("old"):
            return _status(410, "The provided continue parameter is too old")
        selected = [each for (its, _), each in sorted(self._objects.items()) if its == kind and _has(each, labels)]
        begin = int(query.get("continue", "0"))
        end = begin + int(query.get("limit", len(selected) or 1))
        metadata = {"resourceVersion": str(self.version)} | ({"continue": str(end)} if end < len(selected) else {})
        return web.json_response({"metadata": metadata, "items": selected[begin:end]})

    async def _watch(self, request: web.Request, kind: str, labels: dict[str, str], query: dict[str, str]):
        since = int(query["resourceVersion"])
        async with self._changed:
            self.num_watches += 1
            self._changed.notify_all()
        if since < self.oldest:
            return _status(410, f"too old resource version: {since} ({self.oldest})")
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        if self.cuts_watches:
            await response.write(b'{"type":')
            transport.abort()
            return response
        self._open.add(transport)
        next_event = len(self._events) if since >= self.version else 0
        try:
            async with asyncio.timeout(float(query["timeoutSeconds"])):
                if self.bookmarks and query.get("allowWatchBookmarks") == "true":
                    mark = {"metadata": {"resourceVersion": str(self.version)}}
                    if since >= self.version:
                        await response.write(_line("BOOKMARK", mark))
                while True:
                    for version, its, what, found in self._events[next_event:]:
                        if "line" in found:
                            await response.write(found["line"].encode())
                        elif version > since and its == kind and _has(found, labels):
                            await response.write(_line(what, found))
                    next_event = len(self._events)
                    async with self._changed:
                        await self._changed.wait_for(lambda known=next_event: len(self._events) > known)
        except TimeoutError:
            await response.write_eof()
        except ConnectionError:
            pass
        finally:
            self._open.discard(transport)
        return response


def endpoint(host: str, *, pod: str = "", ready: bool | None = True, terminating: bool | None = None) -> dict[str, Any]:
    """One endpoint of a slice."""
    conditions = {"ready": ready, "serving": ready, "terminating": terminating}
    return {
        "addresses": [host],
        "conditions": {name: value for name, value in conditions.items() if value is not None},
        "targetRef": {"kind": "Pod", "uid": pod or f"pod at {host}"},
    }


def pod(host: str, *, ready: bool = True, ending: bool = False, phase: str = "Running") -> dict[str, Any]:
    """The parts of a Pod that matter."""
    return {
        "metadata": {"uid": f"pod at {host}"} | ({"deletionTimestamp": "2026-01-01T00:00:00Z"} if ending else {}),
        "spec": {"containers": [{"name": "agent", "ports": [{"name": "control", "containerPort": 9000}]}]},
        "status": {"phase": phase, "podIP": host, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def kubeconfig(double: KubernetesApiDouble, folder: Path, *, token: str = TOKEN) -> Path:
    """A file that leads there."""
    path = folder / "kubeconfig"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": NAMESPACE}}],
                "clusters": [{"name": "test", "cluster": {"server": double.url}}],
                "users": [{"name": "test", "user": {"token": token}}],
            }
        )
    )
    return path


@asynccontextmanager
async def kubernetes_api() -> AsyncIterator[KubernetesApiDouble]:
    """A running double without objects."""
    double = KubernetesApiDouble()
    app = web.Application()
    for prefix in ("/apis/discovery.k8s.io/v1", "/api/v1"):
        app.router.add_get(prefix + "/namespaces/{namespace}/{kind}", double.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    double.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield double
    finally:
        double.cut()
        await runner.cleanup()


def _has(found: dict[str, Any], labels: dict[str, str]) -> bool:
    return labels.items() <= found["metadata"]["labels"].items()


def _line(kind: str, found: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"


def _status(code: int, message: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "message": message, "reason": "Expired", "code": code}
    return web.json_response(body, status=code)
