"""A server that speaks the Hub's API as far as `huggingface_hub` uses it for downloads, well or with ill intent."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """One repository's files, by path. `listing` overrides fields of the answer, `headers` those of files."""

    repository: str
    files: dict[str, bytes]
    commit: str = COMMIT
    sizes: dict[str, int] = field(default_factory=dict)  # that are listed instead of the true ones
    bodies: dict[str, bytes] = field(default_factory=dict)  # that are sent instead, of any length
    listing: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    listing_error: tuple[int, str] | None = None  # status and the Hub's error code
    file_error: tuple[int, str] | None = None
    redirect_to: str | None = None
    answers: Event = field(default_factory=Event)  # cleared: no listing is answered
    served: list[str] = field(default_factory=list)  # "GET config.json"
    tokens: set[str] = field(default_factory=set)
    encodings: set[str] = field(default_factory=set)
    url: str = ""

    def listed(self) -> dict[str, Any]:
        siblings = [
            {"rfilename": name, "size": self.sizes.get(name, len(content)), "blobId": "0" * 40}
            for name, content in self.files.items()
        ]
        return {"id": self.repository, "sha": self.commit, "siblings": siblings, "tags": [], **self.listing}


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: Any) -> None: ...

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        known = path.startswith((f"/api/models/{hub.repository}", f"/{hub.repository}/"))
        if not known:  # also what the library asks on its own account
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
        hub.tokens.add(self.headers.get("authorization", ""))
        hub.encodings.add(self.headers.get("accept-encoding", ""))
        if path.startswith("/api/"):
            hub.served.append("listing")
            hub.answers.wait(60)
            if hub.listing_error:
                return self._send(hub.listing_error[0], b"{}", {"X-Error-Code": hub.listing_error[1]}, with_body)
            return self._send(200, json.dumps(hub.listed()).encode(), {"Content-Type": "application/json"}, with_body)
        name = path.split("/resolve/", 1)[1].partition("/")[2]
        hub.served.append(f"{self.command} {name}")
        if hub.file_error:
            return self._send(hub.file_error[0], b"{}", {"X-Error-Code": hub.file_error[1], **hub.headers}, with_body)
        content = hub.files[name]
        headers = {"X-Repo-Commit": hub.commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"', **hub.headers}
        if hub.redirect_to is not None:
            headers |= {"Location": hub.redirect_to, "X-Linked-Size": str(len(content))}
            return self._send(302, b"", headers, with_body)
        if with_body and name in hub.bodies:
            content = hub.bodies[name]
        self._send(200, content, headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextmanager
def serving(hub: HubServer, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[HubServer]:
    """Serve it, and have the real library use it, with its cache in a folder of the test."""
    from huggingface_hub import constants

    hub.answers.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    # The library reads its variables once, at its import.
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.answers.set()
        server.shutdown()
        thread.join()
        server.server_close()
