"""Web pages of other sites, which a visitor's browser lets call this machine: none changes or reads anything."""

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
    "localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:1", "[::1]:8001", "10.1.2.3:80",
    "llm.internal:8",
)  # fmt: skip
OTHERS = (
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "", "[", "[evil]:80",
    "x.llm.internal",
)  # fmt: skip


def scope(method: str = "POST", path: str = "/v1/adapters", **headers: str) -> dict[str, Any]:
    named = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"method": method, "path": path, "headers": named}


def is_refused(pages: Pages, asked: dict[str, Any]) -> bool:
    try:
        pages.check(asked)
    except ForeignPage:
        return True
    return False


ORIGIN, EVIL = "https://chat.example.org", "https://evil.example"
PAGES = Pages(["llm.internal"], [ORIGIN], probes=["/health"])


@pytest.mark.parametrize(("hosts", "is_own"), [(OURS, True), (OTHERS, False)], ids=["own", "of a site, perhaps"])
def test_names_of_this_router(hosts: tuple[str, ...], is_own: bool):
    for host in hosts:
        own_page = scope(host=host, origin=f"http://{host}", sec_fetch_site="same-origin")
        for asked in (scope(host=host), own_page):
            assert is_refused(PAGES, asked) is not is_own, host
        PAGES.check(scope("GET", "/health", host=host))


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://localhost:3000", "null", "", "[", "http://[", f"{ORIGIN}.evil.example"],
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


@pytest.mark.parametrize(
    "field",
    [{"hosts": ["a:80"]}, {"hosts": ["*"]}, *({"cors_origins": [origin]} for origin in ("*", "https://a/", "a"))],
)
def test_the_settings_are_names_and_origins(field: dict[str, Any]):
    with pytest.raises(ValidationError):
        RouterConfig.model_validate(field)


async def call(
    cluster: ClusterStandIn, method: str, url: str, body: Any = None, **headers: str
) -> tuple[int, str, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body, headers=named) as answer:
        return answer.status, await answer.text(), answer.headers


async def test_neither_listener_answers_other_sites_without_keys():
    async with managing(1, 1, console=True, hosts=["llm.internal"]) as cluster:
        calls = [("POST", f"{cluster.url}/v1/adapters/a0/{verb}") for verb in ("push", "rollback", "evict")]
        calls += [("POST", f"{cluster.url}/v1/adapters"), ("POST", f"{cluster.url}/v1/completions")]
        calls += [("GET", cluster.url + path) for path in ("/v1/models", "/v1/adapters", "/console/state", "/nothing")]
        paths = ("/metrics", "/ready", "/debug/requests", "/console/state", "/console/v1/models")
        calls += [("GET", cluster.admin_url + path) for path in paths]
        for method, url in calls:
            foreign = ({"host": "evil.example"}, {"origin": EVIL}, {"sec_fetch_site": "cross-site"})
            for headers in foreign:
                status, body, _ = await call(cluster, method, url, **headers)
                assert (status, "foreign_page" in body) == (403, True), (method, url, headers, body)
        for url in (cluster.url, cluster.admin_url):
            for host in ("localhost:8000", "10.0.0.1:80", "llm.internal", "LLM.internal:8001"):
                for path in ("/health", "/ready"):
                    assert (await call(cluster, "GET", url + path, host=host))[0] == 200
            assert (await call(cluster, "GET", f"{url}/health", host="lb.example"))[0] == 200
        assert (await call(cluster, "GET", f"{cluster.url}/v1/models", origin=cluster.url))[0] == 200


async def test_configured_origins_ask_and_read():
    async with running_cluster(1, 1, cors_origins=[ORIGIN]) as cluster:
        url = f"{cluster.url}/v1/chat/completions"
        foreign = {"origin": ORIGIN, "sec_fetch_site": "cross-site"}
        asked = {"access_control_request_method": "POST", "access_control_request_headers": "x-a, authorization"}
        status, _, headers = await call(cluster, "OPTIONS", url, **foreign, **asked)
        assert (status, headers["access-control-allow-origin"]) == (204, ORIGIN)
        assert headers["access-control-allow-headers"] == "x-a, authorization"
        assert "POST" in headers["access-control-allow-methods"]
        for stream in (False, True):
            body = {"model": "base", "messages": [{"role": "user", "content": "x"}], "stream": stream}
            status, _, headers = await call(cluster, "POST", url, body, **foreign)
            assert (status, headers["access-control-allow-origin"], headers["vary"]) == (200, ORIGIN, "origin")
        status, _, headers = await call(cluster, "POST", url, **foreign)
        assert (status, headers["access-control-allow-origin"]) == (400, ORIGIN)
        status, _, headers = await call(cluster, "OPTIONS", url, origin=EVIL, **asked)
        assert (status, "access-control-allow-origin" in headers) == (403, False)


async def test_with_keys(tmp_path: Path):
    async with keyed_cluster(tmp_path, 0, 0, cors_origins=[ORIGIN]) as keyed:
        cluster, asked = keyed.cluster, {"access_control_request_method": "GET"}
        url = f"{cluster.url}/v1/models"
        status, _, headers = await call(cluster, "OPTIONS", url, origin=ORIGIN, **asked)
        assert (status, headers["access-control-allow-origin"]) == (204, ORIGIN)
        status, _, headers = await call(cluster, "GET", url, origin=ORIGIN)
        assert (status, headers["access-control-allow-origin"]) == (401, ORIGIN)  # the page can read why
        status, _, headers = await call(cluster, "OPTIONS", url, origin=EVIL, **asked)
        assert (status, "access-control-allow-origin" in headers) == (401, False)
        assert (await call(cluster, "GET", f"{cluster.url}/health", host="any.example"))[0] == 200
        status, body, _ = await call(cluster, "GET", f"{cluster.admin_url}/metrics", host="evil.example")
        assert (status, "foreign_page" in body) == (403, True)  # this listener never asks for a key
