"""As much of Kubernetes' API as a template's `lookup` asks for. It has no schemas, so nothing can be installed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = found.get(self.path.partition("?")[0])
            body = json.dumps(answer or {"kind": "Status", "status": "Failure", "reason": "NotFound"}).encode()
            self.send_response(200 if answer else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
