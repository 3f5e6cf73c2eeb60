"""Adapters managed over HTTP: a real SQLite catalog and a folder store behind a real router, stand-ins of workers."""

from pathlib import Path
from typing import Any

import pytest
from support.adapters.catalog_databases import SqliteDatabase
from support.router_stand_ins import DIRECTORIES, REVISION_ID, ClusterStandIn, running_cluster, until
from support.routers.management_calls import answered_by, ask, every_change, form, id_of, lora, managing, upload

from adapters.catalog.sql import SqlCatalog

MANAGEMENT = True


class TestAdapters:
    async def test_list(self, tmp_path: Path) -> None:
        async with managing(directories={}) as cluster:
            for name in ("bot", "bee", "acme/bot"):
                await upload(cluster, lora(tmp_path, len(name)), name=name)

            async def names(query: str = "") -> tuple[list[str], bool, str | None]:
                status, page = await ask(cluster, "GET", f"/v1/adapters{query}")
                assert status == 200, page
                return [each["name"] for each in page["data"]], page["has_more"], page["last_id"]

            assert await names() == (["acme/bot", "bee", "bot"], False, "bot")
            assert await names("?tenant=default") == (["bee", "bot"], False, "bot")
            assert await names("?tenant=acme") == (["acme/bot"], False, "acme/bot")
            assert await names("?prefix=be") == (["bee"], False, "bee")
            assert await names("?limit=2") == (["acme/bot", "bee"], True, "bee")
            assert await names("?limit=2&after=bee") == (["bot"], False, "bot")
            assert await names("?limit=1&after=acme/bot") == (["bee"], True, "bee")
            assert await names("?deleted=true") == ([], False, None)
            wrong = ["limit=0", "limit=x", "prefix=b%00", "tenant=%00", "x=1", "deleted=1", "after=b%00"]
            for query, param in ((each, each.partition("=")[0]) for each in wrong):
                status, answer = await ask(cluster, "GET", f"/v1/adapters?{query}")
                assert (status, answer["error"]["param"]) == (400, None if param == "after" else param)

    async def test_one(self, tmp_path: Path, cluster: ClusterStandIn) -> None:
        await upload(cluster, lora(tmp_path, 1), name="acme/bot")
        await upload(cluster, lora(tmp_path, 2), name="acme/bot")
        await answered_by(cluster, "acme/bot")
        await cluster.prefill[0].send_delta(on_disk=[id_of(tmp_path, 2)])
        newest = id_of(tmp_path, 2)
        await until(lambda: all(cluster.fleet.holders_of([newest])[0][tier] == ["p0"] for tier in ("host", "disk")))
        for path in ("/v1/adapters/acme/bot", "/v1/adapters/acme%2Fbot"):
            _, found = await ask(cluster, "GET", path)
            assert (found["name"], found["tenant"], found["aliases"]) == ("acme/bot", "acme", {"latest": 2})
            assert [each["number"] for each in found["revisions"]] == [2, 1]
            workers = found["revisions"][0]["workers"]
            assert (found["latest"]["revision"], workers["host"], workers["disk"]) == (newest, ["p0"], ["p0"])
        assert (await ask(cluster, "GET", "/v1/adapters/acme/bot?limit=1"))[1]["num_revisions"] == 2
        assert (await ask(cluster, "GET", "/v1/adapters/acme"))[0] == 404
        assert (await ask(cluster, "GET", "/v1/adapters/a/b/c"))[0] == 400

    async def test_delete_and_restore(self, tmp_path: Path, cluster: ClusterStandIn) -> None:
        await upload(cluster, lora(tmp_path, 1), name="acme/bot")
        assert await answered_by(cluster, "acme/bot") == id_of(tmp_path, 1)
        status, answer = await ask(cluster, "DELETE", "/v1/adapters/acme/bot")
        assert (status, answer["deleted"]) == (200, True)
        assert await answered_by(cluster, "acme/bot") == 404  # at once, though it was in memory
        assert "acme/bot" not in {card["id"] for card in (await cluster.get("/v1/models"))[1]["data"]}
        _, page = await ask(cluster, "GET", "/v1/adapters?deleted=true")
        assert [each["name"] for each in page["data"]] == ["acme/bot"]
        status, answer = await upload(cluster, lora(tmp_path, 2), name="acme/bot")
        assert (status, answer["error"]["code"]) == (409, "catalog_conflict")
        assert (await ask(cluster, "POST", "/v1/adapters/acme/bot/restore"))[0] == 200
        assert await answered_by(cluster, "acme/bot") == id_of(tmp_path, 1)
        for method, path in (("DELETE", "/v1/adapters/none"), ("POST", "/v1/adapters/none/restore")):
            assert (await ask(cluster, method, path))[0] == 404

    async def test_aliases(self, tmp_path: Path, cluster: ClusterStandIn) -> None:
        for seed in (1, 2, 3):
            await upload(cluster, lora(tmp_path, seed), name="acme/bot")

        async def put(alias: str, **fields: Any) -> tuple[int, Any]:
            return await ask(cluster, "PUT", f"/v1/adapters/acme/bot/aliases/{alias}", json=fields)

        status, move = await put("prod", revision="r1", expected=None)
        assert (status, move["alias"], move["from_number"], move["number"]) == (200, "prod", None, 1)
        assert await answered_by(cluster, "acme/bot@prod") == id_of(tmp_path, 1)
        status, answer = await put("prod", revision="r2", expected=None)
        assert (status, answer["error"]["code"]) == (409, "catalog_conflict")
        status, move = await put("prod", revision=id_of(tmp_path, 2), expected="r1")
        assert (status, move["from_number"], move["number"]) == (200, 1, 2)
        assert await answered_by(cluster, "acme/bot@prod") == id_of(tmp_path, 2)
        assert (await put("prod", revision="r3", expected=id_of(tmp_path, 2)))[0] == 200
        status, move = await ask(cluster, "POST", "/v1/adapters/acme/bot/rollback", json={"alias": "prod"})
        assert (status, move["from_number"], move["number"]) == (200, 3, 2)
        assert await answered_by(cluster, "acme/bot@prod") == id_of(tmp_path, 2)
        assert (await ask(cluster, "POST", "/v1/adapters/acme/bot/rollback"))[1]["number"] == 2  # of latest
        for fields, expected, param in (
            ({}, 400, "revision"),
            ({"revision": "r0"}, 400, "revision"),
            ({"revision": 1}, 400, "revision"),
            ({"revision": "r1", "expected": "x"}, 400, "expected"),
            ({"revision": "r1", "force": True}, 400, "force"),
            ({"revision": "r9"}, 404, None),
        ):
            status, answer = await put("prod", **fields)
            assert (status, answer["error"]["param"]) == (expected, param), answer
        assert (await put("r7", revision="r1"))[0] == 400

    async def test_the_history_of_an_alias(self, tmp_path: Path, cluster: ClusterStandIn) -> None:
        for seed in (1, 2):
            await upload(cluster, lora(tmp_path, seed), name="acme/bot")
        for revision in ("r1", "r2"):
            await ask(cluster, "PUT", "/v1/adapters/acme/bot/aliases/prod", json={"revision": revision})
        _, last = await ask(cluster, "POST", "/v1/adapters/acme/bot/rollback", json={"alias": "prod"})
        path = "/v1/adapters/acme/bot/aliases/prod"
        status, history = await ask(cluster, "GET", path)
        assert (status, history["object"], history["has_more"]) == (200, "list", False)
        moves = history["data"]
        assert [(each["from_number"], each["number"]) for each in moves] == [(2, 1), (1, 2), (None, 1)]
        assert moves[0] == last
        assert {(each["name"], each["alias"], each["moved_by"]) for each in moves} == {("acme/bot", "prod", "http")}
        status, newest = await ask(cluster, "GET", f"{path}?limit=1")
        assert (status, newest) == (200, {"object": "list", "data": [last], "has_more": True})
        for _ in range(10):
            for revision in ("r2", "r1"):
                await ask(cluster, "PUT", path, json={"revision": revision})
        _, history = await ask(cluster, "GET", path)
        assert (len(history["data"]), history["has_more"]) == (20, True)
        for path, status, said in (
            ("acme/bot/aliases/canary", 404, "has no alias 'canary'; it has 'latest', 'prod'"),
            ("acme/bto/aliases/prod", 404, "no adapter 'acme/bto'"),
            ("acme/bot/aliases/r1", 400, "r1"),
            ("acme/bot/aliases/prod?limit=0", 400, "limit must be an integer from 1 to 1000 (found '0')"),
            ("acme/bot/aliases/prod?after=1", 400, "known are: limit"),
        ):
            found, answer = await ask(cluster, "GET", f"/v1/adapters/{path}")
            assert (found, said in answer["error"]["message"]) == (status, True), answer

    async def test_an_adapter_that_is_called_like_a_verb(self, tmp_path: Path, cluster: ClusterStandIn) -> None:
        await upload(cluster, lora(tmp_path, 1), name="acme/restore")
        assert (await ask(cluster, "DELETE", "/v1/adapters/acme/restore"))[0] == 200
        assert (await ask(cluster, "POST", "/v1/adapters/acme/restore"))[0] == 404  # of `acme`
        status, answer = await ask(cluster, "POST", "/v1/adapters/acme/restore/restore")
        assert (status, answer["name"]) == (200, "acme/restore")


class TestWorkers:
    async def test_prewarm_and_evict(self) -> None:
        async with managing(2, 1) as cluster:
            first, second = cluster.prefill
            status, answer = await ask(cluster, "POST", "/v1/adapters/a0/prewarm")
            assert (status, answer["revision"], set(answer["workers"])) == (200, REVISION_ID, {"p0", "p1"})
            assert all(isinstance(seconds, float) for seconds in answer["workers"].values())
            assert first.resident == second.resident == {REVISION_ID}
            assert (first.prewarmed, first.tenants) == ([REVISION_ID], ["default"])
            only_first = {"workers": ["p0"], "reference": "r1"}
            status, answer = await ask(cluster, "POST", "/v1/adapters/default/a0/prewarm", json=only_first)
            assert (status, list(answer["workers"])) == (200, ["p0"])
            assert (len(first.prewarmed), len(second.prewarmed)) == (2, 1)
            first.kept.add(REVISION_ID)
            status, answer = await ask(cluster, "POST", "/v1/adapters/a0/evict", json={"reference": "r1"})
            assert (status, answer["workers"]["p0"]["error"]["code"]) == (200, "adapter_in_use")
            assert (first.resident, second.resident) == ({REVISION_ID}, set())
            assert second.evicted == [(REVISION_ID, True)]

    async def test_what_is_refused(self, cluster: ClusterStandIn) -> None:
        cases: list[tuple[str, dict[str, Any], int, str]] = [
            ("a0/prewarm", {"workers": ["d0"]}, 400, "unknown_worker"),
            ("a0/prewarm", {"workers": "p0"}, 400, "invalid_field"),
            ("a0/prewarm", {"worker": ["p0"]}, 400, "invalid_field"),
            ("a0/prewarm", {"reference": "everywhere@r1"}, 400, "invalid_adapter_reference"),
            ("a0/prewarm", {"reference": "nowhere"}, 404, "adapter_not_found"),
            ("everywhere/prewarm", {}, 503, "no_worker_available"),
            ("everywhere/prewarm", {"workers": ["p0"]}, 400, "unknown_worker"),
            ("none/evict", {}, 404, "adapter_not_found"),
        ]
        for path, fields, status, code in cases:
            found, answer = await ask(cluster, "POST", f"/v1/adapters/{path}", json=fields)
            assert (found, answer["error"]["code"]) == (status, code), (path, fields)
        assert not cluster.prefill[0].ensured


@pytest.mark.slow
async def test_outages_name_no_address(tmp_path: Path) -> None:
    """What stands in the log, where the catalog and the store are, is in no answer."""
    database = SqliteDatabase(tmp_path / "catalog")
    SqlCatalog.open(database.url).close()  # makes the tables
    async with managing(folder=tmp_path / "router", catalog_url=database.url) as cluster:
        files = lora(tmp_path, 2)

        async def refused(code: str, method: str, path: str, **options: Any) -> None:
            status, answer = await ask(cluster, method, path, **options)
            assert (status, answer["error"]["code"]) == (503, code), answer
            assert not any(word in answer["error"]["message"] for word in (str(tmp_path), "sqlite", "file://"))

        with database.down(cluster.adapters._catalog):
            for path in ("/v1/adapters", "/v1/adapters/a0", "/v1/models"):
                await refused("catalog_unavailable", "GET", path)
            await refused("catalog_unavailable", "POST", "/v1/adapters/a0/rollback")
            await refused("catalog_unavailable", "POST", "/v1/adapters", data=form(files, name="bot"))
        (cluster.folder / "store").rename(cluster.folder / "away")
        (cluster.folder / "store").write_bytes(b"no folder")
        await refused("adapter_store_unavailable", "POST", "/v1/adapters", data=form(files, name="bot"))


async def test_where_adapters_are_not_managed(tmp_path: Path) -> None:
    reads = [("GET", f"/v1/adapters{path}", {}) for path in ("", "/bot", "/bot/aliases/prod")]
    async with running_cluster(directories={"a0": DIRECTORIES["a0"]}) as cluster:
        for method, path, options in (*reads, *every_change(tmp_path).values()):
            status, answer = await ask(cluster, method, path, **options)
            assert (status, answer["error"]["code"]) == (403, "management_off"), path
            assert "router.management" in answer["error"]["message"]
        assert await answered_by(cluster, "a0") == REVISION_ID
