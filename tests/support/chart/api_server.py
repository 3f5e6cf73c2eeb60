"""As much of Kubernetes' API as a template's `lookup` asks for. It has no schemas, so nothing can be installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from support.in_thread import in_thread
from support.routers.served_routes import served

_DISCOVERY: dict[str, Any] = {
    "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
    "/apis": {
        "kind": "APIGroupList",
        "groups": [{"name": "apps", "versions": [{"groupVersion": "apps/v1", "version": "v1"}]}],
    },
    "/apis/apps/v1": {
        "kind": "APIResourceList",
        "groupVersion": "apps/v1",
        "resources": [{"name": "statefulsets", "kind": "StatefulSet", "namespaced": True, "verbs": ["get"]}],
    },
}


@contextmanager
def api_server(stateful_set: dict[str, Any]) -> Iterator[str]:
    """The URL of an API server with one StatefulSet."""
    meta = stateful_set["metadata"]
    found = {**_DISCOVERY, f"/apis/apps/v1/namespaces/{meta['namespace']}/statefulsets/{meta['name']}": stateful_set}

    async def answer(request: web.Request) -> web.Response:
        if request.path in found:
            return web.json_response(found[request.path])
        return web.json_response({"kind": "Status", "status": "Failure", "reason": "NotFound"}, status=404)

    with in_thread(served([web.get("/{path:.*}", answer)])) as url:
        yield url
