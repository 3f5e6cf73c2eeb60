"""Web pages of other sites, which a visitor's browser lets call this machine: none changes or reads anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError
from support.router_stand_ins import ClusterStandIn, running_cluster
from support.routers.keyed_cluster import keyed_cluster
from support.routers.management_calls import managing

from cluster.config.router import RouterConfig
from router.errors import ForeignPage
from router.identity.gate import Pages

OURS = (
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:1",
    "[::1]:8001",
    "10.1.2.3:80",
    "llm.internal:8",
)
OTHERS = (
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "",
    "[",
    "[evil]:80",
    "x.llm.internal",
)


def scope(method: str = "POST", path: str = "/v1/adapters", **headers: str) -> dict[str, Any]:
    named = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"method": method, "path": path, "headers": named}


def is_refused(pages: Pages, asked: dict[str, Any]) -> bool:
    try:
        pages.check(asked)
    except ForeignPage:
        return True
    return False


PAGES = Pages(["llm.internal"], ["https://chat.example.org"], probes=["/health"])


@pytest.mark.parametrize("host", OURS)
def test_own_names(host: str):
    PAGES.check(scope(host=host))
    PAGES.check(scope(host=host, origin=f"http://{host}", sec_fetch_site="same-origin"))


@pytest.mark.parametrize("host", OTHERS)
def test_names_that_a_site_may_have_pointed_here(host: str):
    assert is_refused(PAGES, scope(host=host))
    assert is_refused(PAGES, scope(host=host, origin=f"http://{host}", sec_fetch_site="same-origin"))
    PAGES.check(scope("GET", "/health", host=host))


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://localhost:3000",
        "null",
        "",
        "[",
        "http://[",
        "https://chat.example.org.evil.example",
    ],
)
def test_pages_of_other_origins(origin: str):
    for site in ("cross-site", "same-site", "same-origin", "none"):
        assert is_refused(PAGES, scope(host="localhost:8000", origin=origin, sec_fetch_site=site))


def test_calls_without_an_origin():
    for site in ("cross-site", "same-site"):
        for method in ("GET", "POST"):
            assert is_refused(PAGES, scope(method, host="localhost", sec_fetch_site=site, sec_fetch_mode="no-cors"))
        PAGES.check(scope("GET", host="localhost", sec_fetch_site=site, sec_fetch_mode="navigate"))  # a link
        assert is_refused(PAGES, scope(host="localhost", sec_fetch_site=site, sec_fetch_mode="navigate"))  # a form
    PAGES.check(scope(host="localhost", sec_fetch_site="none"))
    PAGES.check(scope(host="localhost"))  # no browser
    PAGES.check(scope())  # HTTP/1.0


def test_configured_origins():
    asked = scope(host="localhost", origin="https://chat.example.org", sec_fetch_site="cross-site")
    PAGES.check(asked)
    assert (b"access-control-allow-origin", b"https://chat.example.org") in PAGES.answer_headers(asked)
    assert PAGES.answer_headers(scope(origin="https://evil.example")) == [(b"vary", b"origin")]
    assert Pages([], []).answer_headers(asked) == []


@pytest.mark.parametrize(
    "field",
    [
        {"hosts": ["a:80"]},
        {"hosts": ["*"]},
        {"cors_origins": ["*"]},
        {"cors_origins": ["https://a/"]},
        {"cors_origins": ["a"]},
    ],
)
def test_the_settings_are_names_and_origins(field: dict[str, Any]):
    with pytest.raises(ValidationError):
        RouterConfig.model_validate(field)


async def call(cluster: ClusterStandIn, method: str, url: str, **headers: str) -> tuple[int, str, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession() as session, session.request(method, url, headers=named) as answer:
        return answer.status, await answer.text(), answer.headers


async def test_neither_listener_answers_other_sites_without_keys():
    async with managing(1, 1, console=True, hosts=["llm.internal"]) as cluster:
        calls = [("POST", f"{cluster.url}/v1/adapters/a0/{verb}") for verb in ("push", "rollback", "evict")]
        calls += [("POST", f"{cluster.url}/v1/adapters"), ("POST", f"{cluster.url}/v1/completions")]
        calls += [("GET", cluster.url + path) for path in ("/v1/models", "/v1/adapters", "/console/state", "/nothing")]
        paths = (
            "/metrics",
            "/ready",
            "/debug/requests",
            "/console/state",
            "/console/v1/models",
        )
        calls += [("GET", cluster.admin_url + path) for path in paths]
        for method, url in calls:
            for headers in (
                {"host": "evil.example"},
                {"origin": "https://evil.example"},
                {"sec_fetch_site": "cross-site"},
            ):
                status, body, _ = await call(cluster, method, url, **headers)
                assert (status, "foreign_page" in body) == (403, True), (method, url, headers, body)
        for url in (cluster.url, cluster.admin_url):
            for host in ("localhost:8000", "10.0.0.1:80", "llm.internal", "LLM.internal:8001"):
                for path in ("/health", "/ready"):
                    assert (await call(cluster, "GET", url + path, host=host))[0] == 200
            assert (await call(cluster, "GET", f"{url}/health", host="lb.example"))[0] == 200
        assert (await call(cluster, "GET", f"{cluster.url}/v1/models", origin=cluster.url))[0] == 200


async def test_configured_origins_ask_and_read():
    origin = "https://chat.example.org"
    async with running_cluster(1, 1, cors_origins=[origin]) as cluster:
        url = f"{cluster.url}/v1/chat/completions"
        asked = {
            "origin": origin,
            "access_control_request_method": "POST",
            "access_control_request_headers": "x-a, authorization",
        }
        status, _, headers = await call(cluster, "OPTIONS", url, **asked)
        assert (status, headers["access-control-allow-origin"]) == (204, origin)
        assert headers["access-control-allow-headers"] == "x-a, authorization"
        assert "POST" in headers["access-control-allow-methods"]
        for body in (
            {"model": "base", "messages": [{"role": "user", "content": "x"}], "stream": stream}
            for stream in (False, True)
        ):
            async with (
                aiohttp.ClientSession() as session,
                session.post(url, json=body, headers={"origin": origin}) as answer,
            ):
                assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, origin)
                assert answer.headers["vary"] == "origin"
                await answer.read()
        status, _, headers = await call(cluster, "POST", url, origin=origin)
        assert (status, headers["access-control-allow-origin"]) == (400, origin)
        status, body, headers = await call(cluster, "OPTIONS", url, **{**asked, "origin": "https://evil.example"})
        assert (status, "access-control-allow-origin" in headers) == (403, False)


async def test_with_keys(tmp_path: Path):
    origin = "https://chat.example.org"
    async with keyed_cluster(tmp_path, 0, 0, cors_origins=[origin]) as keyed:
        cluster = keyed.cluster
        url = f"{cluster.url}/v1/models"
        asked = {"origin": origin, "access_control_request_method": "GET"}
        status, _, headers = await call(cluster, "OPTIONS", url, **asked)
        assert (status, headers["access-control-allow-origin"]) == (204, origin)
        status, _, headers = await call(cluster, "GET", url, origin=origin)
        assert (status, headers["access-control-allow-origin"]) == (401, origin)  # the page can read why
        status, _, headers = await call(cluster, "OPTIONS", url, **{**asked, "origin": "https://evil.example"})
        assert (status, "access-control-allow-origin" in headers) == (401, False)
        assert (await call(cluster, "GET", f"{cluster.url}/health", host="any.example"))[0] == 200
        status, body, _ = await call(cluster, "GET", f"{cluster.admin_url}/metrics", host="evil.example")
        assert (status, "foreign_page" in body) == (403, True)  # this listener never asks for a key
