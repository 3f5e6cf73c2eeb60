"""Every route x every scope x the own tenant, another one, and one with a grant."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.routing import Route
from support.routers.keyed_cluster import TENANT_SCOPES, KeyedCluster, keyed_cluster
from support.routers.management_calls import form

from adapters.catalog.records import Grant
from adapters.scopes import Permission, Scope
from router.app import _guard
from router.identity.gate import PUBLIC, SCOPE_OF

ADAPTER = "acme/bot"
ONE = "/v1/adapters/{name}"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def upload() -> Any:
    return {"data": form({"adapter_config.json": b"{}"}, name=ADAPTER)}


# What each route is asked that names an adapter of acme. A route is here or in NAMES_NO_ADAPTER.
ASKED: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/v1/chat/completions"): {"json": {"model": "base", "adapter": ADAPTER, **CHAT}},
    ("POST", "/v1/completions"): {"json": {"model": f"base:{ADAPTER}", "prompt": "Hi"}},
    ("POST", "/v1/responses"): {"json": {"model": "base", "adapter": ADAPTER, "input": "Hi"}},
    ("POST", "/v1/embeddings"): {"json": {"model": ADAPTER, "input": "Hi"}},
    ("POST", "/v1/tokenize"): {"json": {"adapter": ADAPTER, "prompt": "Hi"}},
    ("POST", "/tokenize"): {"json": {"model": ADAPTER, "prompt": "Hi"}},
    ("POST", "/v1/detokenize"): {"json": {"adapter": ADAPTER, "tokens": [1]}},
    ("POST", "/detokenize"): {"json": {"adapter": ADAPTER, "tokens": [1]}},
    ("GET", "/v1/models/{id}"): {},
    ("GET", ONE): {},
    ("GET", f"{ONE}/aliases/{{alias}}"): {},
    ("DELETE", f"{ONE}/aliases/{{alias}}"): {},
    ("POST", "/v1/adapters"): {},
    ("POST", f"{ONE}/push"): {},
    ("POST", f"{ONE}/rollback"): {},
    ("PUT", f"{ONE}/aliases/{{alias}}"): {"json": {"revision": "r1"}},
    **{("POST", f"{ONE}/{verb}"): {} for verb in ("prewarm", "evict")},
    ("DELETE", ONE): {},
    ("POST", f"{ONE}/restore"): {},
}
NOT_SERVED = [
    *((method, path) for path in ("/v1/responses/{id}", "/api/v1/{path}") for method in ("GET", "POST", "DELETE")),
    ("PUT", "/api/v1/{path}"),
]
NAMES_NO_ADAPTER = {
    *NOT_SERVED,
    ("GET", "/v1/models"),
    ("GET", "/v1/adapters"),
    ("GET", "/v1/usage"),
    *((method, path) for (method, path), scope in SCOPE_OF.items() if scope in (PUBLIC, Scope.ADMIN)),
}


# What a caller gets who may: 200 where it is not listed. Of an error also its code, since a denial is a 404, too.
NOT_OFFERED = (404, "not_offered")
EXPECTED: dict[tuple[str, str], tuple[int, str]] = {
    **dict.fromkeys(NOT_SERVED, NOT_OFFERED),
    ("POST", "/v1/adapters"): (422, "adapter_malformed"),
    ("POST", f"{ONE}/push"): (400, "invalid_field"),
    ("POST", f"{ONE}/rollback"): (409, "catalog_conflict"),
    ("DELETE", f"{ONE}/aliases/{{alias}}"): (400, "invalid_adapter_reference"),  # `latest` stays
}
# What each permission of a grant opens, of the routes that name an adapter.
OPENED = {Permission.INFER: Scope.INFER, Permission.READ: Scope.ADAPTERS_READ}


async def call(keyed: KeyedCluster, key: str | None, method: str, path: str) -> tuple[int, Any]:
    options = upload() if (method, path) in {("POST", "/v1/adapters"), ("POST", f"{ONE}/push")} else {}
    options = {**ASKED.get((method, path), {}), **options}
    path = path.replace("{name}", ADAPTER).replace("{id}", ADAPTER).replace("{alias}", "latest")
    return await keyed.ask(key, method, path, **options)


def state_of(keyed: KeyedCluster) -> Any:
    """Of the catalog, and of the workers."""
    calls = [len(worker.ensured) + len(worker.evicted) for worker in keyed.cluster.workers]
    return keyed.catalog.last_change(), keyed.catalog.show("acme", "bot"), calls


def lacks_scope(found: tuple[int, Any]) -> bool:
    return found[0] == 403 and found[1]["error"]["code"] == "insufficient_scope"


def is_hidden(found: tuple[int, Any], tenant: str) -> bool:
    return found[0] == 404 and f"no adapter '{ADAPTER}' that {tenant} may" in found[1]["error"]["message"]


def is_as_expected(route: tuple[str, str], found: tuple[int, Any]) -> bool:
    """To one who may."""
    status, answer = found
    return (status, answer["error"]["code"] if status >= 400 else "") == EXPECTED.get(route, (200, ""))


def test_the_table_has_every_route_and_no_other():
    assert ASKED.keys() | NAMES_NO_ADAPTER == SCOPE_OF.keys()
    assert not ASKED.keys() & NAMES_NO_ADAPTER


def test_a_route_without_an_entry_is_not_served():
    with pytest.raises(KeyError):
        _guard(Route("/v1/forgotten", lambda _: None, methods=["POST"]), {})


@pytest.mark.slow
async def test_scopes_and_tenants(keyed: KeyedCluster):
    keys = {scope: await keyed.key("acme", {scope}) for scope in Scope}
    others = {scope: await keyed.key("beta", {scope}) for scope in TENANT_SCOPES}
    beta = await keyed.key("beta")
    beta_admin = await keyed.key("beta", {Scope.ADMIN})  # an administrator of any tenant is one of all
    before = state_of(keyed)
    for route, needed in SCOPE_OF.items():
        found = await call(keyed, None, *route)
        assert (found[0] == 401) is (needed is not PUBLIC), (route, found)
        for scope, key in keys.items():
            if scope not in (needed, Scope.ADMIN) and needed is not PUBLIC:
                found = await call(keyed, key, *route)
                assert lacks_scope(found), (route, scope, found)
        for scope, key in others.items():  # each of another tenant's scopes alone
            found = await call(keyed, key, *route)
            if needed is not PUBLIC and scope is not needed:
                assert lacks_scope(found), (route, scope, found)
            elif route in ASKED:
                assert is_hidden(found, "beta"), (route, scope, found)
            else:
                assert found[0] != 403, (route, scope, found)
        found = await call(keyed, beta, *route)
        if route in ASKED:
            assert is_hidden(found, "beta"), (route, found)
        else:
            assert (found[0] == 403) is (needed is Scope.ADMIN), (route, found)
    assert state_of(keyed) == before
    assert not any(worker.engine.bodies for worker in keyed.cluster.workers)

    for permission in Permission:
        grantee = await keyed.key(f"{permission}er")
        keyed.catalog.grants.add(Grant("acme", "bot", f"{permission}er", permission), by=None)
        await keyed.cluster.adapters.refresh()
        for route in ASKED:
            found = await call(keyed, grantee, *route)
            is_opened = SCOPE_OF[route] is OPENED[permission]
            assert is_as_expected(route, found) if is_opened else is_hidden(found, f"{permission}er"), (route, found)
    assert keyed.catalog.show("acme", "bot") == before[1]
    for route, needed in SCOPE_OF.items():  # those who may: last, since they change what there is
        for key in {keys[needed or Scope.INFER], keys[Scope.ADMIN], beta_admin}:
            found = await call(keyed, key, *route)
            assert is_as_expected(route, found), (route, found)
            keyed.catalog.restore("acme", "bot")
            await keyed.cluster.adapters.refresh()


async def test_head_needs_what_get_needs(tmp_path: Path):
    async with keyed_cluster(tmp_path, 0, 0) as keyed, aiohttp.ClientSession() as http:
        key = await keyed.key("acme", {Scope.INFER})
        for path, expected in ((f"/v1/adapters/{ADAPTER}", 403), ("/v1/adapters", 403), ("/v1/models", 200)):
            headers = {"authorization": f"Bearer {key}"}
            async with http.head(f"{keyed.cluster.url}{path}", headers=headers) as response:
                assert response.status == expected, path
