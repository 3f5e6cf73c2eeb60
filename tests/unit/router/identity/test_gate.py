"""Authentication by key: what is accepted, what is refused, and how soon a change is seen."""

import hashlib
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from support.calls import Calls
from support.router_stand_ins import eventually
from support.routers.keyed_cluster import KeyedCluster

from adapters.catalog.records import ApiKey, Change
from adapters.catalog.sql.tenants import digest_of_tenant
from adapters.errors import CatalogUnavailable
from adapters.identity import is_tenant_name
from adapters.scopes import Scope
from cluster.config.router import AuthConfig
from router.errors import CredentialInQuery, IdentityUnavailable, Unauthenticated
from router.identity.access import Directory, Principal
from router.identity.gate import Gate

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = "prelude_abcdefghijkm_" + "x" * 43
ACME = Principal("acme", "acme token of somebody", frozenset({Scope.INFER}))


class Catalog:
    """A catalog with one key, in memory."""

    def __init__(self, **changes: Any) -> None:
        digest = hashlib.sha256(KEY.encode()).digest()
        fields = {"expires_at": None, "revoked_at": None} | changes
        self.key = ApiKey("abcdefghijkm", "acme", "ci", digest, frozenset({Scope.INFER}), NOW, None, **fields)
        self.is_down = False
        self.read_since: int | None = None
        self.keys = self
        self.grants, self.tenants = SimpleNamespace(list=list), SimpleNamespace(generations=dict)

    def list(self) -> Any:
        if self.is_down:
            raise CatalogUnavailable("down")
        return [self.key]

    def changed_since(self, sequence: int) -> Any:
        self.read_since = sequence
        return self.list()


def gate_of(catalog: Catalog | None, now: datetime = NOW) -> Gate:
    directory = Directory(lambda: now)
    if catalog is not None:
        directory.follow(catalog, None)
    return Gate(AuthConfig(), directory)


def scope(*authorization: str, path: str = "/v1/models", query: str = "") -> dict[str, Any]:
    headers = [(b"authorization", each.encode("latin-1")) for each in authorization]
    return {"path": path, "query_string": query.encode(), "headers": [(b"host", b"x"), *headers]}


def test_a_key_is_its_holder():
    assert gate_of(Catalog()).known(scope(f"Bearer {KEY}")) == Principal(
        "acme", "acme key abcdefghijkm (ci)", frozenset({Scope.INFER}), "abcdefghijkm"
    )
    assert gate_of(Catalog()).known(scope(f"bearer  {KEY}")) is not None


@pytest.mark.parametrize(
    "authorization",
    [
        (), ("",), ("Bearer",), ("Bearer ",), (KEY,), (f"Basic {KEY}",), (f"Bearer {KEY[:-1]}y",), (f"Bearer {KEY}x",),
        (f"Bearer {KEY.upper()}",), (f"Bearer {KEY}, Bearer {KEY}",), (f"Bearer {KEY}", f"Bearer {KEY}"),
        ("Bearer nonsense", f"Bearer {KEY}"), (f"Bearer {KEY.replace('a', chr(0xE0))}",),
        ("Bearer prelude_nosuchkeyxxx_" + "x" * 43,), (f"Bearer {'x' * 20_000}",), ("Bearer eyJhbGciOiJub25lIn0.e30.",),
    ],
)  # fmt: skip
def test_credentials_that_are_refused(authorization: tuple[str, ...]):
    with pytest.raises(Unauthenticated) as error:
        gate_of(Catalog()).known(scope(*authorization))
    assert KEY not in str(error.value)


@pytest.mark.parametrize(
    ("key", "now"),
    [({"expires_at": NOW}, NOW), ({"revoked_at": NOW}, NOW), ({"expires_at": NOW}, NOW + timedelta(days=1))],
)
def test_an_expired_or_revoked_key_is_refused(key: dict[str, Any], now: datetime):
    with pytest.raises(Unauthenticated, match="expired or revoked"):
        gate_of(Catalog(**key), now).known(scope(f"Bearer {KEY}"))
    assert gate_of(Catalog(expires_at=NOW), NOW - timedelta(seconds=1)).known(scope(f"Bearer {KEY}"))


@pytest.mark.parametrize("query", [f"key={KEY}", "api_key=x", "API_KEY=x", f"after={KEY}", "access_token", "%6bey=1"])
def test_a_key_in_the_url_is_refused(query: str):
    with pytest.raises(CredentialInQuery, match="revoked"):
        gate_of(Catalog()).known(scope(f"Bearer {KEY}", query=query))


def test_other_queries_pass():
    assert gate_of(Catalog()).known(scope(f"Bearer {KEY}", query="after=acme/prelude_key&limit=3"))


def test_before_the_catalog_is_read_a_key_is_neither_good_nor_bad():
    with pytest.raises(IdentityUnavailable):
        gate_of(None).known(scope(f"Bearer {KEY}"))


def test_an_outage_keeps_known_keys_and_loses_no_change():
    catalog, directory = Catalog(), Directory(lambda: NOW)
    directory.follow(catalog, None)
    catalog.is_down = True
    with pytest.raises(CatalogUnavailable):
        directory.follow(catalog, [Change(7, "keys", None, None)])
    assert directory.principal_of_key(KEY)
    catalog.is_down, catalog.key = False, Catalog(revoked_at=NOW).key
    directory.follow(catalog, [])  # the resolver has applied the change already
    assert directory.principal_of_key(KEY) is None
    assert catalog.read_since == 6


def test_before_the_catalog_is_read_a_tenant_finds_no_kv():
    directory = Directory()
    unknown = directory.cache_namespace(ACME, is_shared=False)
    assert unknown not in ("acme", Directory().cache_namespace(ACME, is_shared=False))
    assert unknown == directory.cache_namespace(ACME, is_shared=False)
    assert not is_tenant_name(unknown)  # nobody else can have it
    directory.follow(Catalog(), None)
    assert directory.cache_namespace(ACME, is_shared=False) == "acme"


def test_a_known_key_costs_few_calls():
    gate, asked = gate_of(Catalog()), scope(f"Bearer {KEY}")
    gate.known(asked)
    with Calls(lambda code: "/router/" in code.co_filename) as calls:  # a garbage collection has calls of its own
        gate.known(asked)
    assert calls.number <= 8


@pytest.mark.parametrize("is_known", [False, True])
def test_a_key_has_its_own_tenants_generation(is_known: bool):
    """Also if the tenant is deleted, and the next one has a key, between two reads of the catalog."""
    catalog, deleted = Catalog(), {digest_of_tenant("acme"): 7}
    directory = Directory(lambda: NOW)
    if is_known:
        directory.follow(catalog, None)

    def read_before(*_: int) -> list[ApiKey]:
        """The key is the old tenant's, or of the next one, whose deletion the changes do not have yet."""
        catalog.list = catalog.changed_since = lambda *_: found if is_known else []
        catalog.tenants = SimpleNamespace(generations=lambda: deleted)
        return found

    found = [catalog.key]
    catalog.list = catalog.changed_since = read_before
    directory.follow(catalog, [Change(8, "keys", None, None)] if is_known else None)
    assert directory.lasting_name(ACME) == "acme#7"
    assert (directory.principal_of_key(KEY) is not None) is is_known  # the old tenant's is gone


def test_who_was_known_before_a_deletion_is_not_the_next_tenant():
    """A request's body may come later than that."""
    catalog, directory = Catalog(), Directory(lambda: NOW)
    directory.follow(catalog, None)
    before = directory.principal_of_key(KEY)
    catalog.tenants = SimpleNamespace(generations=lambda: {digest_of_tenant("acme"): 7})
    directory.follow(catalog, [Change(8, "tenants", None, None)])
    after = directory.principal_of_key(KEY)
    assert before is not None
    assert after is not None
    assert [directory.cache_namespace(each, is_shared=False) for each in (before, after)] == ["acme", "acme#7"]
    assert [directory.lasting_name(each) for each in (before, after, ACME)] == ["acme", "acme#7", "acme#7"]


async def test_the_next_tenant_of_a_name_finds_no_kv_of_the_one_before(keyed: KeyedCluster):
    engine, seen, expected = keyed.cluster.prefill[0].engine, [], ["acme|"]
    for number in range(3):
        key = await keyed.key("acme")
        assert (await keyed.complete(key))[0] == 200
        seen.append(engine.requests[-1]["extra_key"])
        expected.append(f"acme#{keyed.catalog.tenants.remove('acme').generation}|")
        assert number == 0 or not is_tenant_name(seen[-1].removesuffix("|"))  # nobody else can have it
        await eventually(lambda key=key: keyed.complete(key), lambda answer: answer[0] == 401)
    assert seen == expected[:3]
    assert len({*expected}) == 4


async def test_keys_over_http(keyed: KeyedCluster):

    async def status(key: str | None, path: str = "/v1/models") -> int:
        return (await keyed.ask(key, "GET", path))[0]

    assert await status(None, "/health") == 200
    assert [await status(None, path) for path in ("/v1/models", "/nothing/here")] == [401, 401]  # nothing is told
    create = partial(keyed.catalog.keys.create, "acme", "ci", {Scope.INFER}, expires_at=None, by=None)
    record, key = create()
    await eventually(lambda: status(key), lambda got: got == 200)
    # Metrics are on the admin listener.
    assert [await status(key, path) for path in ("/metrics", "/v1/adapters", "/nothing/here")] == [404, 403, 404]
    assert (await keyed.complete(key))[0] == 200
    assert keyed.cluster.prefill[0].engine.requests[-1]["extra_key"] == "acme|"
    _, rotated = create()
    keyed.catalog.keys.revoke(record.key_id)
    await eventually(lambda: status(key), lambda got: got == 401)
    assert await status(rotated) == 200
    got, answer = await keyed.complete(key)
    error = answer["error"]
    assert (got, error["code"], error["type"]) == (401, "invalid_api_key", "authentication_error")
