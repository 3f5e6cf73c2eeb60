"""A server that speaks the Hub's API as far as `huggingface_hub` uses it for downloads, well or with ill intent."""

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from aiohttp import web
from support.in_thread import in_thread
from support.routers.served_routes import served

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

    async def answer(self, request: web.Request) -> web.Response:
        """What it says to a GET, or the head of that."""
        path = request.path
        if not path.startswith((f"/api/models/{self.repository}", f"/{self.repository}/")):
            return _refused(404, "RepoNotFound")  # also what the library asks on its own account
        self.tokens.add(request.headers.get("authorization", ""))
        self.encodings.add(request.headers.get("accept-encoding", ""))
        if path.startswith("/api/"):
            self.served.append("listing")
            await asyncio.to_thread(self.answers.wait, 60)
            return _refused(*self.listing_error) if self.listing_error else web.json_response(self.listed())
        name = path.split("/resolve/", 1)[1].partition("/")[2]
        self.served.append(f"{request.method} {name}")
        if self.file_error:
            return _refused(*self.file_error, **self.headers)
        content = self.files[name]
        headers = {"X-Repo-Commit": self.commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        if self.redirect_to is not None:
            headers |= {"Location": self.redirect_to, "X-Linked-Size": str(len(content))}
            return web.Response(status=302, headers=headers)
        if request.method == "GET":
            content = self.bodies.get(name, content)
        return web.Response(body=content, headers=headers | self.headers)


def _refused(status: int, code: str, **headers: str) -> web.Response:
    return web.json_response({}, status=status, headers={"X-Error-Code": code, **headers})


@contextmanager
def serving(hub: HubServer, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[HubServer]:
    """Serve it, and have the real library use it, with its cache in a folder of the test."""
    from huggingface_hub import constants

    hub.answers.set()
    with in_thread(served([web.get("/{path:.*}", hub.answer)])) as hub.url:
        # The library reads its variables once, at its import.
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        try:
            yield hub
        finally:
            hub.answers.set()
