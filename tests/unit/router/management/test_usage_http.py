"""`GET /v1/usage` and the request log: what clients were given, exactly, by whom and for whom."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from starlette.requests import Request
from support.adapters.catalog_databases import CatalogDatabase
from support.router_stand_ins import (
    MODEL,
    REVISION_ID,
    ClusterStandIn,
    after,
    answers,
    breaks_after,
    drops,
    eventually,
    hangs,
    running_cluster,
    stops_after,
)
from support.router_stand_ins.engine import Behaviour, EngineStandIn
from support.routers.keyed_cluster import keyed_cluster
from support.routers.management_calls import ask

from adapters.catalog.api_keys import key_id_of
from adapters.catalog.records import Grant
from adapters.errors import CatalogUnavailable
from adapters.scopes import Permission, Scope
from router.api import request_record
from router.identity.access import Directory, Principal, set_principal
from router.management.management import Management
from router.management.usage_http import UsageEndpoint
from router.quotas import usage as module

PAIR, UNIFIED = (1, 1, 0), (0, 0, 1)
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
COUNTS = ("requests", "estimated_requests", "prompt_tokens", "cached_tokens", "completion_tokens")


@pytest.fixture(autouse=True)
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FLUSH_S", 0.02)


async def usage(cluster: ClusterStandIn, query: str = "", **headers: str) -> list[dict[str, Any]]:
    status, answer = await ask(cluster, "GET", f"/v1/usage{query}", headers=headers)
    assert status == 200, answer
    return answer["data"]


async def used(cluster: ClusterStandIn, num_requests: int) -> tuple[int, ...]:
    """The counts of all, when this many requests have been written."""

    def has_all(found: list[dict[str, Any]]) -> bool:
        return sum(each["requests"] for each in found) >= num_requests

    found = await eventually(lambda: usage(cluster), has_all)
    assert len(found) <= 1
    return tuple(found[0][name] for name in COUNTS) if found else (0,) * 5


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The line of each request."""
    return [record.__dict__["fields"] for record in caplog.records if record.name == "router.api.request_record"]


# A stand-in counts 7 tokens of each prompt and 3 of each answer.
REQUESTS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("completions", {"prompt": "Hi"}, (1, 0, 7, 2, 3)),
    ("completions", {"prompt": "Hi", "stream": True}, (1, 0, 7, 2, 3)),
    ("completions", {"prompt": ["Hi", "Ho"], "n": 2}, (1, 0, 14, 4, 12)),  # a prompt counts once
    ("completions", {"prompt": ["Hi", "Ho"], "n": 2, "stream": True}, (1, 0, 14, 4, 12)),
    ("completions", {"prompt": "Hi", "max_tokens": 0, "echo": True}, (1, 0, 7, 2, 0)),
    ("chat/completions", CHAT, (1, 0, 7, 2, 3)),
    ("chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}, (1, 0, 7, 2, 3)),
    ("responses", {"input": "Hi"}, (1, 0, 7, 2, 3)),
    ("responses", {"input": "Hi", "stream": True}, (1, 0, 7, 2, 3)),
    ("embeddings", {"input": ["Hi", "Ho", "Hu"]}, (1, 0, 21, 6, 0)),
]


@pytest.mark.parametrize("workers", [PAIR, UNIFIED])
async def test_what_engines_count(workers: tuple[int, int, int], caplog: pytest.LogCaptureFixture) -> None:
    """With no quota. The log has the same of each request."""
    caplog.set_level(logging.INFO, "router.api.request_record")
    async with running_cluster(*workers) as cluster:
        for worker in cluster.prefill + cluster.unified:
            worker.engine.num_cached_tokens = 2
        expected = (0,) * 5
        for path, fields, counts in REQUESTS:
            async with cluster.http.post(f"{cluster.url}/v1/{path}", json={"model": MODEL, **fields}) as response:
                assert response.status == 200, await response.read()
                await response.read()
            expected = tuple(map(sum, zip(expected, counts, strict=True)))
            assert await used(cluster, expected[0]) == expected, (path, fields)
            line = logged(caplog)[-1]
            assert tuple(line[name] for name in COUNTS[2:]) == counts[2:]
            assert (line["tenant"], "key" in line, "tokens_are_estimated" in line) == ("default", False, False)
        assert 'prelude_router_tenant_tokens_total{kind="output",tenant="other"} 42.0' in await cluster.metrics_page()


async def test_what_was_refused_or_came_to_nothing_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.api.request_record")
    async with running_cluster(*UNIFIED) as cluster:
        engine = cluster.unified[0].engine
        assert (await cluster.post(prompt="Hi", adapter="nobody"))[0] == 404
        assert (await cluster.post(prompt="Hi", n=0))[0] == 400
        engine.behaviours = [answers(400)]
        assert (await cluster.post(prompt="Hi"))[0] == 400
        engine.behaviours = [drops]
        assert (await cluster.post(prompt="Hi"))[0] == 502
        engine.behaviours = [hangs]
        leaving = asyncio.create_task(cluster.post(prompt="Hi"))  # it gets no part of its answer
        await cluster.has_phase("waiting_first_event")
        leaving.cancel()
        await cluster.is_idle()
        assert len(logged(caplog)) == 5
        assert not any("prompt_tokens" in line for line in logged(caplog))
        assert (await cluster.post(prompt="Hi"))[0] == 200
        assert await used(cluster, 1) == (1, 0, 7, 0, 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_counts_once(stream: bool) -> None:
    """And nothing of what an earlier attempt had read and found in a cache."""
    async with running_cluster(2, 1) as cluster:
        first, second = cluster.prefill
        first.engine.num_cached_tokens = 5
        cluster.decode[0].engine.behaviours = [fails_when_read(first.engine)]
        second.engine.behaviours = [after(3600)]  # its answer does not come, but what it has read is used
        async with cluster.http.post(
            f"{cluster.url}/v1/completions", json={"model": MODEL, "prompt": "Hi", "stream": stream}
        ) as response:
            assert response.status == 200
            await response.read()
        assert [len(worker.engine.bodies) for worker in (first, cluster.decode[0])] == [1, 2]
        assert await used(cluster, 1) == (1, 0, 7, 0, 3)


def fails_when_read(prefill: EngineStandIn) -> Behaviour:
    """Once the prefill worker has answered."""

    async def behave(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await eventually(lambda: asyncio.sleep(0, prefill), lambda found: found.bodies and not found.num_running)
        await asyncio.sleep(0.1)  # and the router has its answer
        return await answers(500)(engine, fields, request)

    return behave


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/completions", {"prompt": [1, 2, 3, 4]}), ("/v1/chat/completions", CHAT)]
)
@pytest.mark.parametrize("workers", [PAIR, UNIFIED])
@pytest.mark.parametrize("ends", ["left", "broken"])
async def test_a_stream_that_ends_early_costs_what_it_has_sent(
    workers: tuple[int, int, int],
    path: str,
    fields: Mapping[str, Any],
    ends: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "router.api.request_record")
    num_events = 2 if path == "/v1/completions" else 3  # a chat's first one has no token
    async with running_cluster(*workers) as cluster:
        engine = (cluster.decode or cluster.unified)[0].engine
        engine.behaviours = [stops_after(num_events) if ends == "left" else breaks_after(num_events)]
        asked = {"model": MODEL, "stream": True, "max_tokens": 500, **fields}
        async with cluster.http.post(f"{cluster.url}{path}", json=asked) as response:
            for _ in range(num_events):
                await response.content.readuntil(b"\n\n")
            if ends == "left":
                response.close()
            else:
                assert b"error" in await response.read()
        found = await used(cluster, 1)
        assert (found[0], found[1], found[4]) == (1, 1, 2)
        if workers == PAIR:
            assert found[2] == 7  # the prefill worker has counted
        elif path == "/v1/completions":
            assert found[2] == 4  # the router has, of a prompt that is token ids
        else:
            assert 0 < found[2] < 50  # estimated
    [line] = [each.__dict__["fields"] for each in caplog.records if each.name == "router.api.request_record"]
    assert (line["prompt_tokens"], line["completion_tokens"]) == (found[2], 2)
    assert line["tokens_are_estimated"] is True


async def test_shared_prefixes_tell_nothing_of_others() -> None:
    async with running_cluster(*PAIR, share_base_prefixes=True) as cluster:
        cluster.prefill[0].engine.num_cached_tokens = 5
        await cluster.post(prompt="Hi")
        await cluster.stream(prompt="Hi")
        assert await used(cluster, 2) == (2, 0, 14, 0, 6)


async def test_by_adapter_and_revision(cluster: ClusterStandIn) -> None:
    await cluster.post(prompt="Hi", adapter="a0")
    await cluster.post(prompt="Hi")
    await used(cluster, 2)
    found = await usage(cluster, "?group_by=adapter,revision,model,key")
    assert [(each["adapter"], each["revision"], each["model"], each["key"], each["requests"]) for each in found] == [
        (None, None, MODEL, None, 1),
        ("a0", REVISION_ID, MODEL, None, 1),
    ]
    status, answer = await ask(cluster, "GET", "/v1/usage?from=2026-02-01&to=2026-02-01T05:00Z")
    assert (status, answer) == (
        200,
        {"object": "usage", "from": "2026-02-01T00:00:00Z", "to": "2026-02-01T05:00:00Z", "group_by": ["tenant"],
         "data": []},
    )  # fmt: skip
    for query, param in (
        ("from=today", "from"), ("to=2026-02-01T05:01Z", "to"), ("group_by=x", "group_by"), ("form=x", "form"),
    ):  # fmt: skip
        status, answer = await ask(cluster, "GET", f"/v1/usage?{query}")
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_field", param)


async def test_tenants_see_their_own(tmp_path: Path) -> None:
    """Which adapter's owner does not matter, but who calls. Management may be off."""
    async with keyed_cluster(tmp_path, *UNIFIED, management=False) as keyed:
        keyed.catalog.grants.add(Grant("acme", "bot", "beta", Permission.INFER), by=None)
        acme, beta = await keyed.key("acme"), await keyed.key("beta")
        admin = await keyed.key("ops", {Scope.ADMIN})
        for key, number in ((acme, 1), (beta, 2)):
            for _ in range(number):
                assert (await keyed.complete(key, adapter="acme/bot"))[0] == 200

        async def of(key: str, query: str = "") -> dict[str, int]:
            found = await usage(keyed.cluster, query, authorization=f"Bearer {key}")
            return {each["tenant"]: each["requests"] for each in found}

        assert await eventually(lambda: of(admin), lambda found: sum(found.values()) == 3) == {"acme": 1, "beta": 2}
        assert await of(acme) == {"acme": 1}
        assert await of(beta) == {"beta": 2}
        assert await of(admin, "?tenant=beta") == {"beta": 2}
        assert await of(acme, "?tenant=beta") == {}
        (row,) = await usage(keyed.cluster, "?group_by=key,adapter", authorization=f"Bearer {beta}")
        assert (row["key"], row["adapter"]) == (key_id_of(beta), "acme/bot")
        status, answer = await keyed.ask(await keyed.key("acme", {Scope.INFER}), "GET", "/v1/usage")
        assert (status, answer["error"]["code"]) == (403, "insufficient_scope")

        # The next tenant of a name is another one, for operators too.
        generation = keyed.catalog.tenants.remove("acme").generation
        await keyed.cluster.adapters.refresh()
        assert (await keyed.ask(acme, "GET", "/v1/usage"))[0] == 401
        acme = await keyed.key("acme")
        assert await of(acme) == {}
        assert (await keyed.complete(acme))[0] == 200
        assert await eventually(lambda: of(acme), bool) == {f"acme#{generation}": 1}
        assert await of(admin) == {"acme": 1, f"acme#{generation}": 1, "beta": 2}
        assert await of(admin, f"?tenant=acme%23{generation}") == {f"acme#{generation}": 1}


async def test_a_request_that_outlasts_its_tenant_is_not_the_next_ones(tmp_path: Path) -> None:
    """It is billed when it ends."""
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow(*_: Any) -> None:
        begun.set()
        await may_end.wait()

    async with keyed_cluster(tmp_path, *UNIFIED) as keyed, asyncio.TaskGroup() as tasks:
        keyed.cluster.unified[0].engine.behaviours.append(slow)
        admin = await keyed.key("ops", {Scope.ADMIN})
        asked = tasks.create_task(keyed.complete(await keyed.key("acme")))
        await begun.wait()
        keyed.catalog.tenants.remove("acme")
        following = await keyed.key("acme")
        may_end.set()
        assert (await asked)[0] == 200

        async def of(key: str) -> dict[str, int]:
            found = await usage(keyed.cluster, "", authorization=f"Bearer {key}")
            return {each["tenant"]: each["requests"] for each in found}

        assert await eventually(lambda: of(admin), bool) == {"acme": 1}
        assert await of(following) == {}


async def test_a_token_sees_nothing_before_names_of_deleted_tenants_are_known() -> None:
    """Its tenant may be the second one of that name."""
    adapters = SimpleNamespace(directory=Directory())
    endpoint = UsageEndpoint(cast(Management, SimpleNamespace(backends=SimpleNamespace(adapters=adapters))))
    scope: dict[str, Any] = {"type": "http", "query_string": b""}
    set_principal(scope, Principal("acme", "a token", frozenset({Scope.ADAPTERS_READ})))
    with pytest.raises(CatalogUnavailable, match="not been read yet"):
        await endpoint.show(Request(scope))


async def test_two_routers_and_a_restart(
    database: CatalogDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, of one tenant in one hour, written only when they stop."""
    monkeypatch.setattr(module, "_FLUSH_S", 3600)
    options: dict[str, Any] = {"catalog_url": database.url, "directories": {}}
    for number in (1, 2):
        async with (
            running_cluster(*UNIFIED, folder=tmp_path / "one", **options) as one,
            running_cluster(*UNIFIED, folder=tmp_path / "two", **options) as two,
        ):
            assert sum(each["requests"] for each in await usage(one)) == (number - 1) * 20
            await asyncio.gather(*(router.post(prompt="Hi") for router in (one, two) for _ in range(10)))
    async with running_cluster(*UNIFIED, folder=tmp_path / "one", **options) as one:
        assert await used(one, 40) == (40, 0, 280, 0, 120)


async def test_when_memory_is_full_others_are_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_record, "MAX_ROWS", 1)
    async with running_cluster(*UNIFIED) as cluster:
        for _ in range(2):
            await cluster.post(prompt="Hi")
            await cluster.post(prompt="Hi", adapter="a0")
        assert await used(cluster, 2) == (2, 0, 14, 0, 6)
        assert "prelude_router_usage_requests_lost_total 2.0" in await cluster.metrics_page()
