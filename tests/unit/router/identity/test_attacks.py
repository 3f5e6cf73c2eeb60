"""Attacks across tenants. Each names what would be gained."""

import asyncio
import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.calls import Calls
from support.router_stand_ins import answers
from support.routers.keyed_cluster import KeyedCluster, keyed_cluster

from adapters.catalog.records import Grant
from adapters.scopes import Permission, Scope

JSON = {"content-type": "application/json"}
LOOK_ALIKES = (
    "асme/bot",  # the first two letters are Cyrillic
    "acme/b\u043et",
    "ａｃｍｅ/bot",  # full width, which NFKC would fold
    "acme\u2215bot", "acme\uff0fbot", "acme/bot\u200b", "ACME/bot", "acme/Bot", "acme/bot ", "acme//bot",
    "acme/../acme/bot", "beta/../acme/bot", "./acme/bot", "acme/bot/../bot", "acme%2Fbot", "acme\\bot", "acme/bot\x00",
    "*/bot", "|acme/bot",
)  # fmt: skip


async def revision_or_status(keyed: KeyedCluster, key: str, name: str) -> str | int:
    status, answer = await keyed.complete(key, adapter=name)
    return answer["system_fingerprint"] if status == 200 else status


async def test_names_that_look_like_another_tenants(keyed: KeyedCluster):
    beta, acme = await keyed.key("beta"), await keyed.key("acme")
    assert "-" in str(await revision_or_status(keyed, acme, "acme/bot"))
    before = keyed.catalog.last_change()
    for name in LOOK_ALIKES:
        for key in (beta, acme):
            assert await revision_or_status(keyed, key, name) in (400, 404), name
        status, _ = await keyed.ask(beta, "DELETE", f"/v1/adapters/{name.replace(chr(0), '%00')}")
        assert status in (400, 404), name
    assert keyed.catalog.last_change() == before


CLAIMS: tuple[dict[str, Any], ...] = (
    {"extra_key": "acme|"},
    {"cache_salt": "acme|"},
    {"lora_path": "sha256:" + "0" * 64},
    {"tenant": "acme"},
    {"user": "acme"},
    {"principal": {"tenant": "acme"}},
    {"metadata": {"tenant": "acme"}},
)


async def test_fields_that_claim_another_tenant(keyed: KeyedCluster):
    """Refused, or without effect: the engine gets the caller's namespace."""
    beta = await keyed.key("beta")
    headers = {"x-tenant": "acme", "x-prelude-tenant": "acme", "x-forwarded-user": "acme"}
    (prefill,) = keyed.cluster.prefill
    for fields in CLAIMS:
        prefill.engine.bodies.clear()
        body = {"model": "base", "prompt": "Hi", **fields}
        status, _ = await keyed.ask(beta, "POST", "/v1/completions", json=body, headers=headers)
        assert status in (200, 400)
        namespaces = [each["extra_key"] for each in prefill.engine.requests]
        assert namespaces == (["beta|"] if status == 200 else []), fields


async def test_a_field_given_twice_and_an_adapter_named_twice(keyed: KeyedCluster):
    beta = await keyed.key("beta")
    twice = b'{"model": "base", "adapter": "acme/bot", "adapter": "base", "prompt": "Hi", "model": "base"}'
    for body in (twice, twice.replace(b'"base", "prompt"', b'"acme/bot", "prompt"')):
        status, _ = await keyed.ask(beta, "POST", "/v1/completions", data=body, headers=JSON)
        assert status in (400, 404)
    assert not any(worker.engine.bodies for worker in keyed.cluster.workers)


_TWICE_AT_DEPTH = [
    b'"messages": [{"role": "user", "content": "Hi", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
    b'"messages": [{"role": "user", "role": "pirate", "content": "Hi"}]',
    b'"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "type": "image_url"}]}]',
    b'"messages": [{"role": "user", "content": "Hi"}], "messages": [{"role": "pirate", "content": "Hi"}]',
    b'MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}, "function": {"name": 5}}]',
    b'MESSAGES, "tools": [{"type": "function", "function": {"name": "f", "name": {}}}]',
    b'MESSAGES, "response_format": {"type": "text", "type": "whatever"}',
    b'MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "schema": "x"}}',
    b'MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": '
    b'{"type": "string", "pattern": "a", "pattern": "(a|a)*(a|a)*(a|a)*b{1,1000000}"}}}',
]


async def test_a_key_given_twice_at_depth_smuggles_nothing(tmp_path: Path):
    """What engines would read, the last one, is what is checked: whichever comes last, the bad one is no way in."""
    messages = b'"messages": [{"role": "user", "content": "Hi"}]'
    async with keyed_cluster(tmp_path) as keyed:
        beta = await keyed.key("beta")
        for fields in _TWICE_AT_DEPTH:
            body = b'{"model": "base", "max_tokens": 1, ' + fields.replace(b"MESSAGES", messages) + b"}"
            status, answer = await keyed.ask(beta, "POST", "/v1/chat/completions", data=body, headers=JSON)
            assert status == 400, (fields, answer)
        assert not any(worker.engine.bodies for worker in keyed.cluster.workers)


async def raw(keyed: KeyedCluster, *headers: str, path: str = "/v1/models") -> int:
    """The status of a request whose headers are sent as they are."""
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""]
    reader, writer = await keyed.cluster.open("\r\n".join(lines).encode("latin-1"))
    try:
        return int((await asyncio.wait_for(reader.read(), 120)).split(b" ")[1])
    finally:
        writer.close()


async def test_headers(tmp_path: Path):
    async with keyed_cluster(tmp_path, 0, 0) as keyed:
        acme, beta = await keyed.key("acme"), await keyed.key("beta")
        assert await raw(keyed, f"Authorization: Bearer {beta}") == 200
        assert await raw(keyed, f"AUTHORIZATION: bearer {beta}") == 200
        assert await raw(keyed, f"Authorization: Bearer {beta}", f"authorization: Bearer {acme}") == 401
        assert await raw(keyed, f"Authorization: Bearer {beta}", "Authorization: Bearer x") == 401
        assert await raw(keyed, f"Authorization: Bearer {beta}, Bearer {acme}") == 401
        assert await raw(keyed, f"Authorization: Bearer {beta}\r\n {acme}") in (400, 401)  # folded
        assert await raw(keyed, f"Authorization : Bearer {beta}") in (400, 401)
        assert await raw(keyed, f"Proxy-Authorization: Bearer {beta}") == 401
        assert await raw(keyed, f"X-Api-Key: {beta}") == 401
        assert await raw(keyed, f"Cookie: authorization=Bearer {beta}") == 401
        assert await raw(keyed, path=f"/v1/models?key={beta}") == 400
        assert await raw(keyed, f"Authorization: Bearer {beta}", path=f"/v1/models?after={acme}") == 400
        for path in ("/health/../metrics", "//metrics", "/health/..%2fmetrics", "/ready;/../v1/models", "/%2e/metrics"):
            assert await raw(keyed, path=path) == 401, path  # a public path is that path only


async def test_grants_give_what_they_say_and_no_more(keyed: KeyedCluster):
    beta, catalog = await keyed.key("beta"), keyed.catalog

    async def seen() -> tuple[str | int, int, list[str], list[str]]:
        await keyed.cluster.adapters.refresh()
        used = await revision_or_status(keyed, beta, "acme/bot")
        shown, _ = await keyed.ask(beta, "GET", "/v1/adapters/acme/bot")
        models = (await keyed.ask(beta, "GET", "/v1/models"))[1]["data"]
        listed = (await keyed.ask(beta, "GET", "/v1/adapters"))[1]["data"]
        return used, shown, [each["id"] for each in models], [each["name"] for each in listed]

    assert await seen() == (404, 404, ["base"], [])
    infer, read = (Grant("acme", "bot", "beta", each) for each in (Permission.INFER, Permission.READ))
    catalog.grants.add(infer, by=None)
    used, *others = await seen()
    assert others == [404, ["base", "acme/bot"], []]
    assert "-" in str(used)
    assert keyed.cluster.prefill[0].engine.requests[-1]["extra_key"] == "beta|"  # not the owner's
    catalog.grants.add(read, by=None)
    assert (await seen())[1:] == (200, ["base", "acme/bot"], ["acme/bot"])
    for method, path in (("DELETE", ""), ("POST", "/rollback"), ("POST", "/evict")):
        assert (await keyed.ask(beta, method, f"/v1/adapters/acme/bot{path}"))[0] == 404, path
    catalog.grants.remove(infer)
    catalog.grants.remove(read)
    assert await seen() == (404, 404, ["base"], [])
    catalog.grants.add(Grant("acme", None, "beta", Permission.INFER), by=None)
    used, *others = await seen()
    assert others == [404, ["base", "acme/bot"], []]
    assert "-" in str(used)
    acme = await keyed.key("acme")
    await keyed.ask(acme, "DELETE", "/v1/adapters/acme/bot")
    assert (await keyed.ask(beta, "GET", "/v1/adapters?deleted=true"))[1]["data"] == []
    assert len((await keyed.ask(acme, "GET", "/v1/adapters?deleted=true"))[1]["data"]) == 1


async def with_cached_tokens(engine: Any, fields: dict[str, Any], request: Any) -> Any:
    """An engine's answer that counts the tokens found in its prefix cache."""
    answer = engine.answer(fields)
    answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 5}
    answer["sglext"] = {"cached_tokens_details": {"device": 5, "host": 0, "storage_backend": None}}
    return await answers(200, answer)(engine, fields, request)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["base", "adapter"])
@pytest.mark.parametrize("is_shared", [False, True])
async def test_cached_counts_tell_of_the_own_tenant_only(tmp_path: Path, of: str, is_shared: bool):
    """What is not shared has a namespace of each tenant. What is shared, by choice, has no counts."""
    config = {"share_base_prefixes": is_shared and of == "base"}
    async with keyed_cluster(tmp_path, 0, 0, 1, **config) as keyed:
        catalog, engine = keyed.catalog, keyed.cluster.unified[0].engine
        catalog.grants.add(Grant("acme", "bot", "beta", Permission.INFER), by=None)
        catalog.grants.set_shared_prefixes("acme", "bot", is_shared and of == "adapter")
        adapter = {"adapter": "acme/bot"} if of == "adapter" else {}
        for tenant in ("acme", "beta"):
            key = await keyed.key(tenant)
            engine.behaviours.append(with_cached_tokens)
            status, answer = await keyed.complete(key, **adapter)
            assert status == 200, answer
            assert engine.requests[-1]["extra_key"] == ("*|" if is_shared else f"{tenant}|")
            counts = answer["usage"]["prompt_tokens_details"], answer["sglext"]["cached_tokens_details"]
            assert (counts == (None, None)) is is_shared
            said = json.dumps(answer).replace('"cached_tokens_details": null', "")
            assert ('"cached_tokens' in said) is not is_shared


@pytest.mark.slow
async def test_unknown_and_forbidden_names_take_the_same_steps(keyed: KeyedCluster):
    """By the fewest calls that five tries took, in random order, over one connection: other tasks only add calls.

    So the fewest of both meet sooner or later; had one of them more steps, they never would.
    """
    beta = await keyed.key("beta", {Scope.INFER, Scope.ADAPTERS_READ})
    took: dict[str, list[int]] = {"acme/bot": [], "acme/bop": []}
    answers: dict[str, set[str]] = {name: set() for name in took}
    random = Random(1)

    def fewest(numbers: list[int]) -> float:
        return next((number for number in sorted(set(numbers)) if numbers.count(number) >= 5), math.inf)

    while not abs(fewest(took["acme/bot"]) - fewest(took["acme/bop"])) <= 2:
        name = random.choice(list(took))
        with Calls(builtins=True) as calls:
            status, answer = await keyed.complete(beta, adapter=name)
        took[name].append(calls.number)
        answers[name].add(f"{status} {answer}".replace(name, "NAME"))
        assert len(took[name]) < 400, took
    assert answers["acme/bot"] == answers["acme/bop"]
