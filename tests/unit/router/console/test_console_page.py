"""The console's files, and what the listeners let a browser do: real sockets, stand-in workers, no browser."""

import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from support.router_stand_ins import ClusterStandIn, repository_root, running_cluster
from support.routers.keyed_cluster import keyed_cluster
from support.routers.management_calls import imported, managing

from adapters.scopes import Scope
from cluster.config.router import RouterConfig
from cluster.local.demo import demo_config
from router.console.page import ASSETS, FOLDER, HEADERS, PAGE, POLICY

STATIC = Path(str(files("router.console") / "static"))
TEXTS = {name: (STATIC / name).read_text() for name in (PAGE, *ASSETS)}
CHAT = {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


async def fetch(cluster: ClusterStandIn, url: str, method: str = "GET", **options: Any) -> tuple[int, Any, Any]:
    async with cluster.http.request(method, url, **options) as response:
        is_json = response.content_type == "application/json"
        return response.status, await (response.json() if is_json else response.text()), response.headers


def test_every_file_is_served_and_nothing_comes_from_elsewhere() -> None:
    assert {path.name for path in STATIC.iterdir()} == {PAGE, *ASSETS}
    assert sum(map(len, TEXTS.values())) < 64 * 1024
    for name, text in TEXTS.items():
        rest = text.replace("http://www.w3.org/2000/svg", "")  # a namespace, which nobody fetches
        assert not re.search(r"https?:|wss?:|(src|href|url|from|import)\W{0,3}//|@import|data:\w+/", rest), name
    page = TEXTS[PAGE]
    named = re.findall(r'(?:src|href)="([^"#][^"]*)"', page)
    assert {f"{FOLDER}/console.js", f"{FOLDER}/console.css"} <= set(named) <= {f"{FOLDER}/{name}" for name in ASSETS}
    scripts = {name: text for name, text in TEXTS.items() if name.endswith(".js")}
    imported = {name for text in scripts.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert imported | {"console.js"} == scripts.keys()  # all are used


def test_every_file_is_installed() -> None:
    project = tomllib.loads((repository_root() / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["router.console"]
    found = {path for pattern in patterns for path in STATIC.parent.glob(pattern)}
    assert {STATIC / name for name in TEXTS} <= found


def test_the_files_need_none_of_what_the_policy_forbids() -> None:
    page = TEXTS[PAGE]
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", page)
    unsafe = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|srcdoc|createContextualFragment"
    )
    kept = r"localStorage|sessionStorage|indexedDB|document\.cookie|caches\b"
    for name in ASSETS:
        assert not re.search(f"{unsafe}|{kept}|setAttribute\\(.style", TEXTS[name]), name
    directives = dict(each.split(" ", 1) for each in POLICY.split("; "))
    assert directives["default-src"] == directives["form-action"] == directives["frame-ancestors"] == "'none'"
    assert directives["script-src"] == directives["connect-src"] == directives["style-src"] == "'self'"
    assert "unsafe" not in POLICY
    assert "*" not in POLICY


async def test_pages_and_their_headers() -> None:
    async with running_cluster(0, 0, console=True) as cluster:
        for url in (f"{cluster.admin_url}/console", f"{cluster.url}/"):
            base = url.removesuffix("/console").rstrip("/")
            calls = FOLDER if url.endswith("/console") else ""
            status, text, headers = await fetch(cluster, url)
            assert status == 200
            assert f'data-calls="{calls}" data-model="base" data-needs-key="false"' in text
            assert 'data-managed="false"' in text
            assert headers["content-type"].startswith("text/html")
            assert HEADERS.items() <= headers.items()
            for name in ASSETS:
                status, text, headers = await fetch(cluster, f"{base}{FOLDER}/{name}")
                assert (status, text) == (200, TEXTS[name])
                assert HEADERS.items() <= headers.items()
                assert headers["content-type"].startswith(("text/css", "text/javascript", "image/svg+xml"))
            status, text, headers = await fetch(cluster, f"{base}{FOLDER}/state")
            assert (status, text["model"]) == (200, "base")
            assert HEADERS.items() <= headers.items()
            for path in ("/console/../app.py", "/console/..%2fpage.py", "/console/page.py", "/console/"):
                status, answer, _ = await fetch(cluster, f"{base}{path}")
                assert (status, answer["error"]["code"]) == (404, "unknown_path"), path


def test_the_demo_has_it_for_clients() -> None:
    assert RouterConfig.model_validate(demo_config()["router"]).console


async def test_clients_have_no_console_unless_it_is_asked_for() -> None:
    async with running_cluster(0, 0) as cluster:
        for path in ("/", "/console", "/console/state", "/console/console.js", "/console/v1/models"):
            status, answer, _ = await fetch(cluster, f"{cluster.url}{path}")
            assert (status, answer["error"]["code"]) == (404, "unknown_path"), path


async def test_calls_through_the_admin_listener() -> None:
    async with managing(1, 1) as cluster:
        base = f"{cluster.admin_url}/console"
        assert 'data-managed="true"' in (await fetch(cluster, base))[1]
        for name in ("a0", "everywhere"):
            await imported(cluster, name)
        status, answer, headers = await fetch(
            cluster, f"{base}/v1/chat/completions", "POST", json={**CHAT, "adapter": "a0"}
        )
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello wide world")
        assert headers["x-prelude-adapter"] == "a0"
        for path in ("/v1/adapters?limit=1", "/v1/adapters/a0", "/v1/models"):
            assert (await fetch(cluster, base + path))[:2] == (await fetch(cluster, cluster.url + path))[:2]
        refused = [
            ("GET", "/v1/adapters/a/b/c"),
            ("GET", "/v1/adapters/a0/aliases/latest"),
            ("POST", "/v1/adapters/a0/push"),
            ("POST", "/v1/adapters/a0/restore"),
            ("POST", "/v1/adapters/a0/evict"),
            ("POST", "/v1/adapters/rollback"),
            ("PUT", "/v1/adapters/a0"),
            ("PUT", "/v1/adapters/a0/rollback"),
            ("GET", "/v1/responses"),
            ("POST", "/v1/chat/completions/"),
        ]
        for method, path in refused:
            status, answer, _ = await fetch(cluster, base + path, method)
            assert (status, answer["error"]["code"]) == (403, "console_refused"), path
        assert (await fetch(cluster, f"{base}/v1/adapters/a0", "DELETE"))[0] == 405


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        ({"admin": {"insecure": True}}, True),
        ({"admin": {"insecure": True}, "insecure": True}, False),  # as open as the clients' listener
        ({}, False),
    ],
)
async def test_calls_through_an_admin_listener_open_to_others_need_keys_or_consent(
    config: dict[str, Any], is_refused: bool
) -> None:
    async with running_cluster(0, 0, console=True, **config) as cluster:
        status, answer, _ = await fetch(cluster, f"{cluster.admin_url}/console/v1/models")
        if is_refused:
            assert (status, answer["error"]["code"]) == (403, "console_refused")
            assert "set router.auth" in answer["error"]["message"]
        else:
            assert (status, answer["object"]) == (200, "list")
        assert (await fetch(cluster, f"{cluster.admin_url}/console/state"))[0] == 200


async def test_with_keys(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    async with keyed_cluster(tmp_path, 0, 0, console=True) as keyed:
        cluster = keyed.cluster
        keys = {scope: await keyed.key("acme", {scope}) for scope in Scope}
        beta = await keyed.key("beta")

        async def status_of(url: str, key: str | None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return (await fetch(cluster, url, headers=headers))[0]

        state, page = f"{cluster.url}/console/state", f"{cluster.url}/"
        assert 'data-needs-key="true" data-state-needs-key="true"' in (await fetch(cluster, page))[1]
        assert [await status_of(f"{cluster.url}/console/{name}", None) for name in ASSETS] == [200] * len(ASSETS)
        assert await status_of(state, None) == 401
        for scope, key in keys.items():
            assert await status_of(state, key) == (200 if scope is Scope.ADMIN else 403)
        assert await status_of(f"{state}?key={keys[Scope.ADMIN]}", None) == 400  # keys are in no URL

        admin = f"{cluster.admin_url}/console"
        assert 'data-needs-key="true" data-state-needs-key="false"' in (await fetch(cluster, admin))[1]
        assert await status_of(f"{admin}/state", None) == 200  # as /ready and /debug/requests beside it
        for path in ("/v1/adapters", "/v1/adapters/acme/bot", "/v1/models"):
            assert await status_of(f"{admin}{path}", None) == 401
        read = keys[Scope.ADAPTERS_READ]
        assert await status_of(f"{admin}/v1/adapters/acme/bot", read) == 200
        assert await status_of(f"{admin}/v1/adapters/acme/bot", keys[Scope.INFER]) == 403
        assert await status_of(f"{admin}/v1/adapters/acme/bot", beta) == 404
    async with keyed_cluster(tmp_path / "open", 0, 0, admin={"insecure": True}) as keyed:  # open to others
        url = f"{keyed.cluster.admin_url}/console/v1/models"
        headers = {"authorization": f"Bearer {await keyed.key('acme', {Scope.INFER})}"}
        assert (await fetch(keyed.cluster, url))[0] == 401
        assert (await fetch(keyed.cluster, url, headers=headers))[0] == 200
