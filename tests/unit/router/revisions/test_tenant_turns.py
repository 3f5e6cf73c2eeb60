"""Tenants take turns at the catalog's threads: what one of them asks keeps no other waiting."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from support.router_stand_ins import eventually
from support.routers.keyed_cluster import keyed_cluster
from support.routers.management_calls import form, lora

from adapters.identity import AdapterReference
from adapters.library import AdapterLibrary
from router.errors import TooManyCatalogCalls
from router.revisions import adapter_service
from router.revisions.adapter_service import TenantTurns


async def test_so_many_at_a_time_in_order() -> None:
    turns = TenantTurns(2, waiting=1)
    running: list[int] = []
    go_on = asyncio.Event()

    async def call(number: int, tenant: str | None) -> None:
        async with turns.turn(tenant):
            running.append(number)
            await go_on.wait()

    calls = [asyncio.create_task(call(number, "acme")) for number in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyCatalogCalls, match="3 requests of tenant acme"):
        await calls[3]
    others = [asyncio.create_task(call(10, "beta")), *(asyncio.create_task(call(n, None)) for n in range(20, 25))]
    await asyncio.sleep(0)
    assert running == [0, 1, 10, *range(20, 25)]
    calls[0].cancel()
    await asyncio.gather(calls[0], return_exceptions=True)
    await asyncio.sleep(0)
    assert running[-1] == 2
    leaving = asyncio.create_task(call(3, "acme"))
    await asyncio.sleep(0)
    leaving.cancel()  # while it waits
    await asyncio.gather(leaving, return_exceptions=True)
    go_on.set()
    await asyncio.gather(*calls[1:3], *others)
    assert 3 not in running
    assert not turns._lines


async def test_pages_and_names_of_one_tenant_keep_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog does not answer acme: its requests took all threads, and beta's got a 503 after ten seconds."""
    monkeypatch.setattr(adapter_service, "_RESOLVE_TIMEOUT_S", 60.0)
    go_on = threading.Event()
    stuck: list[str] = []
    async with keyed_cluster(tmp_path, 0, 0, 1) as keyed:
        service = keyed.cluster.adapters
        listed, resolve = service._catalog.list, service._resolver.resolve

        def wait_for(tenant: str, kind: str) -> None:
            if tenant == "acme":
                stuck.append(kind)
                go_on.wait(60)

        def slow_list(*arguments: Any, viewer: Any, **named: Any) -> Any:
            wait_for(viewer[0], "page")
            return listed(*arguments, viewer=viewer, **named)

        def slow_resolve(reference: str) -> Any:
            wait_for(AdapterReference.parse(reference).tenant, "name")
            return resolve(reference)

        monkeypatch.setattr(service._catalog, "list", slow_list)
        monkeypatch.setattr(service._resolver, "resolve", slow_resolve)
        acme, beta = await keyed.key("acme"), await keyed.key("beta")
        asked = [asyncio.create_task(keyed.ask(acme, "GET", "/v1/models")) for _ in range(10)]
        asked += [asyncio.create_task(keyed.complete(acme, adapter=f"acme/x{number}")) for number in range(10)]
        try:
            await eventually(lambda: asyncio.sleep(0, stuck), lambda found: len(set(found)) == 2)
            async with asyncio.timeout(120):
                assert (await keyed.ask(beta, "GET", "/v1/models"))[0] == 200
                assert (await keyed.complete(beta, adapter="beta/x"))[0] == 404
            assert sorted(stuck) == ["name"] * 2 + ["page"] * 2
        finally:
            go_on.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 10 + [404] * 10


async def test_adapters_of_one_tenant_that_take_long_to_read_keep_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be made so that it takes minutes."""
    go_on = threading.Event()
    stuck: list[str] = []
    imported = AdapterLibrary.import_directory

    def slow_import(library: AdapterLibrary, name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("acme/"):
            stuck.append(name)
            go_on.wait(60)
        return imported(library, name, *arguments, **named)

    monkeypatch.setattr(AdapterLibrary, "import_directory", slow_import)
    async with keyed_cluster(tmp_path, 0, 0, 1) as keyed:
        acme, beta = await keyed.key("acme"), await keyed.key("beta")
        files = lora(tmp_path, 1)

        async def uploaded(key: str, name: str) -> int:
            return (await keyed.ask(key, "POST", "/v1/adapters", data=form(files, name=name)))[0]

        asked = [asyncio.create_task(uploaded(acme, f"acme/x{number}")) for number in range(2)]
        try:
            turns = keyed.cluster.adapters._import_turns
            await eventually(
                lambda: asyncio.sleep(0, turns._lines.get("acme")),
                lambda line: line is not None and line.num_calls == 2,
            )
            async with asyncio.timeout(120):
                assert await uploaded(beta, "beta/x") == 201
            assert len(stuck) == 1
        finally:
            go_on.set()
        assert await asyncio.gather(*asked) == [201, 201]
