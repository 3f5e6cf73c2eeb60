"""Adapters managed over HTTP: a real SQLite catalog and a folder store behind a real router, stand-ins of workers."""

from __future__ import annotations

import asyncio
import glob
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.catalog_databases import SqliteDatabase
from support.management_calls import answered_by, ask, files_of, form, id_of, lora, managing, upload
from support.router_stand_ins import (
    BASE,
    DIRECTORIES,
    LIMITS,
    REVISION_ID,
    TEMPLATE,
    ClusterStandIn,
    after,
    eventually,
    open_catalog,
    running_cluster,
)

from adapters.errors import AdapterIncompatible
from samples.random_adapters import write_random_lora, write_random_reft

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def left_over() -> set[str]:
    return set(glob.glob(f"{tempfile.gettempdir()}/prelude-work-upload-*"))


_FILE_BEGINS = b'--x\r\nContent-Disposition: form-data; name="file"; filename="adapter_config.json"\r\n\r\n{}'


class TestUpload:
    @pytest.mark.parametrize("name", ["bot", "acme/bot"])
    def test_a_new_adapter_is_served_at_once(self, tmp_path: Path, name: str) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                assert await answered_by(cluster, name) == 404
                before = left_over()
                status, answer = await upload(cluster, lora(tmp_path, 1), name=name)
                assert status == 201, answer
                assert (answer["name"], answer["number"], answer["alias"]) == (name, 1, "latest")
                assert answer["revision"] == id_of(tmp_path, 1) == await answered_by(cluster, name)
                assert (answer["kinds"], answer["positions"]) == (["lora"], "prefill")
                assert left_over() <= before
                status, again = await upload(cluster, files_of(tmp_path / "lora-1"), name=name)
                assert (status, again["number"]) == (201, 1)  # the same content is the same revision

        asyncio.run(scenario())

    def test_another_layout(self, tmp_path: Path) -> None:
        files = files_of(write_random_reft(tmp_path / "reft", BASE, 3, layout="pyreft"))
        assert any("#" in name for name in files)

        async def scenario() -> None:
            async with managing() as cluster:
                status, answer = await upload(cluster, files, name="reft")
                assert (status, answer["kinds"]) == (201, ["reft"])

        asyncio.run(scenario())

    def test_an_alias_moves_instead_of_latest(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                await upload(cluster, lora(tmp_path, 1), name="bot")
                status, answer = await upload(cluster, lora(tmp_path, 2), name="bot", alias="canary")
                assert (status, answer["number"], answer["alias"]) == (201, 2, "canary")
                assert await answered_by(cluster, "bot") == id_of(tmp_path, 1)
                assert await answered_by(cluster, "bot@canary") == id_of(tmp_path, 2)
                status, answer = await upload(cluster, lora(tmp_path, 3), name="bot", alias="r7")
                assert (status, answer["error"]["param"]) == (400, "alias")
                assert (await ask(cluster, "GET", "/v1/adapters/bot"))[1]["num_revisions"] == 2

        asyncio.run(scenario())

    def test_files_that_are_refused(self, tmp_path: Path) -> None:
        names = ["../evil.safetensors", "a/evil.json", "..\\evil.json", "/etc/evil.json", ".evil.json", ""]
        names += ["%2e%2e%2fevil.json", "x" * 300 + ".json", "adapter_model.bin", "evil.py", "évil.json"]
        changes = [({name: b"x"}, 400, "invalid_upload") for name in names] + [
            ({CONFIG: b"{"}, 422, "adapter_malformed"),
            ({WEIGHTS: b"short"}, 422, "adapter_malformed"),
            ({WEIGHTS: b""}, 422, "adapter_malformed"),
            ({WEIGHTS: bytes(LIMITS.max_bytes + 9 * 1024**2)}, 413, "body_too_large"),
        ]

        async def scenario() -> None:
            async with managing() as cluster:
                before = left_over()
                assert cluster.adapters._catalog is not None
                last = cluster.adapters._catalog.last_change()
                for change, status, code in changes:
                    found, answer = await upload(cluster, {**lora(tmp_path, 1), **change}, name="bot")
                    assert (found, answer["error"]["code"]) == (status, code), change
                    assert tempfile.gettempdir() not in answer["error"]["message"]
                    assert left_over() <= before
                assert cluster.adapters._catalog.last_change() == last
                assert not list((cluster.folder / "store").rglob("evil*"))
                assert not glob.glob(f"{tempfile.gettempdir()}/evil*")

        asyncio.run(scenario())

    def test_a_size_that_is_not_declared(self, tmp_path: Path) -> None:
        """Chunked: the limit counts what comes."""
        head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.safetensors"\r\n\r\n'

        async def chunks() -> Any:
            yield head
            for _ in range(200):
                yield bytes(1024**2)

        async def scenario() -> None:
            async with managing() as cluster:
                before = left_over()
                headers = {"content-type": "multipart/form-data; boundary=x"}
                try:
                    status, answer = await ask(cluster, "POST", "/v1/adapters", data=chunks(), headers=headers)
                    assert (status, answer["error"]["code"]) == (413, "body_too_large")
                except aiohttp.ClientError:  # the answer can be lost where the sender goes on sending
                    pass
                await eventually(lambda: asyncio.sleep(0, left_over()), lambda found: found <= before)
                assert (await ask(cluster, "GET", "/v1/adapters/bot"))[0] == 404

        asyncio.run(scenario())

    @pytest.mark.parametrize(
        ("fields", "status", "param"),
        [
            ({}, 400, "name"),
            ({"name": "a b"}, 400, None),
            ({"name": "../x"}, 400, None),
            ({"name": "base"}, 400, "name"),
            ({"name": "bot", "tenant": "x"}, 400, "tenant"),
            ({"name": "bot", "alias": "x" * 2000}, 400, "alias"),
        ],
    )
    def test_fields_that_are_refused(
        self, tmp_path: Path, fields: dict[str, str], status: int, param: str | None
    ) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                found, answer = await upload(cluster, lora(tmp_path, 1), **fields)
                assert (found, answer["error"]["param"]) == (status, param), answer

        asyncio.run(scenario())

    def test_bodies_that_are_no_upload(self) -> None:
        part = b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\nbot\r\n'
        bodies = [
            b"nonsense",
            b"",
            b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n--x--\r\n",
            b"--x\r\n" + b"A: b\r\n" * 100 + b"\r\n",
            part,
            part + b"--x",
            part + b"--x--",
        ]

        async def scenario() -> None:
            async with managing() as cluster:

                async def refused(content_type: str, body: bytes) -> None:
                    headers = {"content-type": content_type}
                    status, answer = await ask(cluster, "POST", "/v1/adapters", data=body, headers=headers)
                    assert (status, answer["error"]["code"]) == (400, "invalid_upload"), body

                await refused("application/json", b"{}")
                await refused("multipart/form-data", part + b"--x--")
                for body in bodies:
                    await refused("multipart/form-data; boundary=x", body)

        asyncio.run(scenario())

    def test_an_interrupted_upload_leaves_nothing(self) -> None:
        head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.safetensors"\r\n\r\n'

        async def scenario() -> None:
            async with managing() as cluster:
                before = left_over()
                host, port = cluster.url.removeprefix("http://").split(":")
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(
                    b"POST /v1/adapters HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n"
                    b"content-type: multipart/form-data; boundary=x\r\n\r\n" + head + bytes(2 * 1024**2)
                )
                await writer.drain()
                (folder,) = await eventually(
                    lambda: asyncio.sleep(0, left_over() - before), lambda new: any(map(glob.glob, _files_in(new)))
                )
                writer.close()
                await eventually(lambda: asyncio.sleep(0, left_over()), lambda found: folder not in found)
                assert (await cluster.post(prompt="Hi"))[0] == 200

        asyncio.run(scenario())

    def test_an_upload_that_stops_has_a_deadline(self) -> None:
        async def chunks() -> Any:
            yield b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\nbo'
            await asyncio.sleep(5)

        async def scenario() -> None:
            async with managing(body_timeout_s=0.2) as cluster:
                before = left_over()
                headers = {"content-type": "multipart/form-data; boundary=x"}
                status, answer = await ask(cluster, "POST", "/v1/adapters", data=chunks(), headers=headers)
                assert (status, answer["error"]["code"]) == (408, "body_too_slow")
                assert left_over() <= before

        asyncio.run(scenario())

    def test_a_router_that_stops_says_so(self) -> None:
        async def chunks() -> Any:
            yield _FILE_BEGINS
            await asyncio.sleep(5)

        async def scenario() -> None:
            async with managing(drain_timeout_s=0.5) as cluster:
                headers, before = {"content-type": "multipart/form-data; boundary=x"}, left_over()
                asking = asyncio.create_task(ask(cluster, "POST", "/v1/adapters", data=chunks(), headers=headers))
                await eventually(lambda: asyncio.sleep(0, left_over() - before), bool)
                cluster.server.should_exit = True
                status, answer = await asking
                assert (status, answer["error"]["code"]) == (503, "router_stopping")
                await eventually(lambda: asyncio.sleep(0, left_over()), lambda found: found <= before)

        asyncio.run(scenario())

    def test_more_uploads_than_are_taken(self, tmp_path: Path) -> None:
        go_on = asyncio.Event()

        async def chunks() -> Any:
            yield b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\nbot\r\n' + _FILE_BEGINS
            await go_on.wait()
            yield b"\r\n--x--\r\n"

        async def scenario() -> None:
            async with managing() as cluster:
                headers, before = {"content-type": "multipart/form-data; boundary=x"}, left_over()
                slow = [
                    asyncio.create_task(ask(cluster, "POST", "/v1/adapters", data=chunks(), headers=headers))
                    for _ in range(4)
                ]
                files = lora(tmp_path, 1)
                await eventually(lambda: asyncio.sleep(0, left_over() - before), lambda new: len(new) == 4)
                status, answer = await upload(cluster, files, name="bot")
                assert (status, answer["error"]["code"]) == (429, "too_many_uploads")
                go_on.set()
                assert {status for status, _ in await asyncio.gather(*slow)} == {422}  # they have no weights
                assert (await upload(cluster, files, name="bot"))[0] == 201

        asyncio.run(scenario())

    def test_uploads_at_once_of_the_same_name(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                all_files = [lora(tmp_path, seed) for seed in range(4)]
                answers = await asyncio.gather(*(upload(cluster, files, name="bot") for files in all_files))
                assert sorted(answer["number"] for _, answer in answers) == [1, 2, 3, 4]
                for number, (_, answer) in enumerate(answers):
                    assert answer["revision"] == id_of(tmp_path, number)
                    assert await answered_by(cluster, f"bot@r{answer['number']}") == answer["revision"]

        asyncio.run(scenario())


def _files_in(folders: set[str]) -> list[str]:
    return [f"{folder}/*" for folder in folders]


class TestAdapters:
    def test_list(self, tmp_path: Path) -> None:
        async def scenario() -> None:
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
                for query, param in (
                    ("limit=0", "limit"),
                    ("limit=x", "limit"),
                    ("x=1", "x"),
                    ("deleted=1", "deleted"),
                ):
                    status, answer = await ask(cluster, "GET", f"/v1/adapters?{query}")
                    assert (status, answer["error"]["param"]) == (400, param)

        asyncio.run(scenario())

    def test_one(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                await upload(cluster, lora(tmp_path, 1), name="acme/bot")
                await upload(cluster, lora(tmp_path, 2), name="acme/bot")
                await answered_by(cluster, "acme/bot")
                await cluster.prefill[0].send_delta(on_disk=[id_of(tmp_path, 2)])
                for path in ("/v1/adapters/acme/bot", "/v1/adapters/acme%2Fbot"):
                    _, found = await eventually(
                        lambda path=path: ask(cluster, "GET", path),
                        lambda answer: answer[1]["workers"] == {"host": ["p0"], "disk": ["p0"]},
                    )
                    assert (found["name"], found["tenant"], found["aliases"]) == ("acme/bot", "acme", {"latest": 2})
                    assert [each["number"] for each in found["revisions"]] == [2, 1]
                    assert found["latest"]["revision"] == id_of(tmp_path, 2)
                assert (await ask(cluster, "GET", "/v1/adapters/acme/bot?limit=1"))[1]["num_revisions"] == 2
                assert (await ask(cluster, "GET", "/v1/adapters/acme"))[0] == 404
                assert (await ask(cluster, "GET", "/v1/adapters/a/b/c"))[0] == 400

        asyncio.run(scenario())

    def test_delete_and_restore(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
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

        asyncio.run(scenario())

    def test_aliases(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
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
                    ({"revision": "prod"}, 400, "revision"),
                    ({"revision": 1}, 400, "revision"),
                    ({"revision": "r1", "expected": "x"}, 400, "expected"),
                    ({"revision": "r1", "force": True}, 400, "force"),
                    ({"revision": "r9"}, 404, None),
                ):
                    status, answer = await put("prod", **fields)
                    assert (status, answer["error"]["param"]) == (expected, param), answer
                assert (await put("r7", revision="r1"))[0] == 400

        asyncio.run(scenario())

    def test_the_history_of_an_alias(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                for seed in (1, 2):
                    await upload(cluster, lora(tmp_path, seed), name="acme/bot")
                for revision in ("r1", "r2"):
                    await ask(cluster, "PUT", "/v1/adapters/acme/bot/aliases/prod", json={"revision": revision})
                _, last = await ask(cluster, "POST", "/v1/adapters/acme/bot/rollback", json={"alias": "prod"})
                for path in ("/v1/adapters/acme/bot/aliases/prod", "/v1/adapters/acme%2Fbot/aliases/prod"):
                    status, history = await ask(cluster, "GET", path)
                    assert (status, history["object"], history["has_more"]) == (200, "list", False)
                    moves = history["data"]
                    assert [(each["from_number"], each["number"]) for each in moves] == [(2, 1), (1, 2), (None, 1)]
                    assert moves[0] == last
                    assert {(each["name"], each["alias"], each["moved_by"]) for each in moves} == {
                        ("acme/bot", "prod", "http")
                    }
                    status, newest = await ask(cluster, "GET", f"{path}?limit=1")
                    assert (status, newest) == (200, {"object": "list", "data": [last], "has_more": True})
                for _ in range(10):
                    for revision in ("r2", "r1"):
                        await ask(cluster, "PUT", "/v1/adapters/acme/bot/aliases/prod", json={"revision": revision})
                status, history = await ask(cluster, "GET", "/v1/adapters/acme/bot/aliases/prod")
                assert (len(history["data"]), history["has_more"]) == (20, True)
                for path, status, said in (
                    ("acme/bot/aliases/canary", 404, "has no alias 'canary'; it has 'latest', 'prod'"),
                    ("acme/bto/aliases/prod", 404, "did you mean 'acme/bot'"),
                    ("acme/bot/aliases/r1", 400, "r1"),
                    ("acme/bot/aliases/prod?limit=0", 400, "limit must be an integer from 1 to 1000 (found '0')"),
                    ("acme/bot/aliases/prod?after=1", 400, "known are: limit"),
                ):
                    found, answer = await ask(cluster, "GET", f"/v1/adapters/{path}")
                    assert (found, said in answer["error"]["message"]) == (status, True), answer

        asyncio.run(scenario())

    def test_another_router_sees_it_within_a_second(self, tmp_path: Path) -> None:
        """The median of several changes: one may fall into a pause of the machine."""
        took_s = []

        async def scenario() -> None:
            async with managing(folder=tmp_path) as one, managing(folder=tmp_path) as other:

                async def sees(expected: object) -> None:
                    began_at = time.monotonic()
                    await eventually(lambda: answered_by(other, "bot"), lambda got: got == expected)
                    took_s.append(time.monotonic() - began_at)

                await upload(one, lora(tmp_path, 1), name="bot")
                await upload(one, lora(tmp_path, 2), name="bot")
                await sees(id_of(tmp_path, 2))
                await ask(one, "POST", "/v1/adapters/bot/rollback")
                await sees(id_of(tmp_path, 1))
                await ask(one, "DELETE", "/v1/adapters/bot")
                await sees(404)

        asyncio.run(scenario())
        assert statistics.median(took_s) < 1

    def test_an_adapter_that_is_called_like_a_verb(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                await upload(cluster, lora(tmp_path, 1), name="acme/restore")
                assert (await ask(cluster, "GET", "/v1/adapters/acme/restore"))[1]["name"] == "acme/restore"
                assert (await ask(cluster, "DELETE", "/v1/adapters/acme/restore"))[0] == 200
                assert (await ask(cluster, "POST", "/v1/adapters/acme/restore"))[0] == 404  # of `acme`
                status, answer = await ask(cluster, "POST", "/v1/adapters/acme/restore/restore")
                assert (status, answer["name"]) == (200, "acme/restore")
                await upload(cluster, lora(tmp_path, 1), name="acme/export")
                assert (await ask(cluster, "GET", "/v1/adapters/acme%2Fexport"))[1]["name"] == "acme/export"
                status, answer = await ask(cluster, "GET", "/v1/adapters/acme/export")
                assert (status, answer["error"]["message"]) == (404, "there is no adapter 'acme'")
                for path in ("acme/export/export", "acme%2Fexport/export"):
                    async with cluster.http.get(f"{cluster.url}/v1/adapters/{path}") as response:
                        assert response.headers["x-prelude-adapter"] == "acme/export"

        asyncio.run(scenario())


class TestWorkers:
    def test_prewarm_pin_and_evict(self) -> None:
        async def scenario() -> None:
            async with managing(2, 1) as cluster:
                first, second = cluster.prefill
                status, answer = await ask(cluster, "POST", "/v1/adapters/a0/prewarm")
                assert (status, answer["revision"], set(answer["workers"])) == (200, REVISION_ID, {"p0", "p1"})
                assert all(isinstance(seconds, float) for seconds in answer["workers"].values())
                assert first.resident == second.resident == {REVISION_ID}
                assert first.prewarmed == [REVISION_ID]
                only_first = {"workers": ["p0"], "reference": "r1"}
                status, answer = await ask(cluster, "POST", "/v1/adapters/default/a0/pin", json=only_first)
                assert (status, list(answer["workers"])) == (200, ["p0"])
                assert (first.pinned, second.pinned) == ({REVISION_ID}, set())
                status, answer = await ask(cluster, "POST", "/v1/adapters/a0/evict", json={"reference": "a0@r1"})
                assert (status, answer["workers"]["p0"]["error"]["code"]) == (200, "adapter_in_use")
                assert (first.resident, second.resident) == ({REVISION_ID}, set())
                assert second.evicted == [(REVISION_ID, True)]
                await ask(cluster, "POST", "/v1/adapters/a0/unpin", json={"workers": None})
                assert not first.pinned

        asyncio.run(scenario())

    @pytest.mark.parametrize("tier", ["host", "disk", None])
    def test_prewarm_to_a_tier(self, tier: str | None) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                (worker,) = cluster.prefill
                status, answer = await ask(cluster, "POST", "/v1/adapters/a0/prewarm", json={"tier": tier})
                assert (status, list(answer["workers"])) == (200, ["p0"])
                assert worker.prewarmed == [REVISION_ID]
                on_disk = {REVISION_ID} if tier == "disk" else set()
                assert (worker.on_disk, worker.resident) == (on_disk, {REVISION_ID} - on_disk)
                where = {"host": [], "disk": ["p0"]} if tier == "disk" else {"host": ["p0"], "disk": []}
                await eventually(
                    lambda: ask(cluster, "GET", "/v1/adapters/a0"), lambda answer: answer[1]["workers"] == where
                )

        asyncio.run(scenario())

    @pytest.mark.parametrize("tier", ["gpu", "", "HOST", 1, ["disk"], {"disk": True}, True, "x" * 10_000])
    def test_tiers_that_are_none(self, tier: Any) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                status, answer = await ask(cluster, "POST", "/v1/adapters/a0/prewarm", json={"tier": tier})
                assert (status, answer["error"]["param"]) == (400, "tier")
                said = answer["error"]["message"]
                assert said == f"tier must be 'host' or 'disk' (found {json.dumps(tier)[:80]})"
                for verb in ("pin", "unpin", "evict"):
                    status, answer = await ask(cluster, "POST", f"/v1/adapters/a0/{verb}", json={"tier": "disk"})
                    assert (status, answer["error"]["param"]) == (400, "tier")
                assert not cluster.prefill[0].ensured

        asyncio.run(scenario())

    def test_workers_that_fail(self) -> None:
        async def scenario() -> None:
            async with managing(2, 1, adapter_timeout_s=0.5) as cluster:
                first, second = cluster.prefill
                first.ensure_errors = [grpc.StatusCode.RESOURCE_EXHAUSTED]
                status, answer = await ask(cluster, "POST", "/v1/adapters/a0/prewarm")
                assert (status, answer["workers"]["p0"]["error"]["code"]) == (200, "adapter_unavailable")
                first.ensure_delay_s = 2
                second.ensure_errors = [AdapterIncompatible("rank 512 is over 64")]
                status, answer = await ask(cluster, "POST", "/v1/adapters/a0/prewarm")
                assert status in (422, 504)

        asyncio.run(scenario())

    @pytest.mark.parametrize(
        ("path", "fields", "status", "code"),
        [
            ("a0/prewarm", {"workers": ["d0"]}, 400, "unknown_worker"),
            ("a0/prewarm", {"workers": ["p9"]}, 400, "unknown_worker"),
            ("a0/prewarm", {"workers": "p0"}, 400, "invalid_field"),
            ("a0/prewarm", {"worker": ["p0"]}, 400, "invalid_field"),
            ("a0/prewarm", {"reference": "everywhere@r1"}, 400, "invalid_field"),
            ("a0/prewarm", {"reference": "nowhere"}, 404, "adapter_not_found"),
            ("everywhere/prewarm", {}, 503, "no_worker_available"),
            ("everywhere/prewarm", {"workers": ["p0"]}, 400, "unknown_worker"),
            ("none/pin", {}, 404, "adapter_not_found"),
        ],
    )
    def test_what_is_refused(self, path: str, fields: dict[str, Any], status: int, code: str) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                found, answer = await ask(cluster, "POST", f"/v1/adapters/{path}", json=fields)
                assert (found, answer["error"]["code"]) == (status, code)
                assert not cluster.prefill[0].ensured

        asyncio.run(scenario())


class TestPush:
    def test_it_is_loaded_where_the_old_one_was(self, tmp_path: Path) -> None:
        """And nowhere else; the next request finds it resident."""

        async def scenario() -> None:
            async with managing(3, 1) as cluster:
                await upload(cluster, lora(tmp_path, 1), name="acme/bot")
                first, second, _ = cluster.prefill
                for worker in (first, second):
                    await worker.make_resident(id_of(tmp_path, 1))
                await _resident_on(cluster, "acme/bot", ["p0", "p1"])
                files = lora(tmp_path, 2)
                status, answer = await ask(cluster, "POST", "/v1/adapters/acme/bot/push", data=form(files))
                assert (status, answer["revision"], answer["number"]) == (200, id_of(tmp_path, 2), 2)
                assert (answer["alias"], set(answer["workers"])) == ("latest", {"p0", "p1"})
                assert answer["seconds"] >= max(answer["workers"].values())
                assert [worker.ensured for worker in cluster.prefill] == [[id_of(tmp_path, 2)]] * 2 + [[]]
                assert await answered_by(cluster, "acme/bot") == id_of(tmp_path, 2)
                assert await answered_by(cluster, "acme/bot@r1") == id_of(tmp_path, 1)
                assert not any(worker.prewarmed for worker in cluster.prefill)

        asyncio.run(scenario())

    def test_requests_in_flight_finish_on_the_old_one(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                await upload(cluster, lora(tmp_path, 1), name="bot")
                await answered_by(cluster, "bot")
                cluster.decode[0].engine.behaviours = [after(1.0)]
                running = asyncio.create_task(answered_by(cluster, "bot"))
                await eventually(lambda: cluster.admin("/debug/requests"), lambda page: len(page[1]["requests"]) == 1)
                status, _ = await ask(cluster, "POST", "/v1/adapters/bot/push", data=form(lora(tmp_path, 2)))
                assert status == 200
                assert not running.done()
                assert await answered_by(cluster, "bot") == id_of(tmp_path, 2)
                assert await running == id_of(tmp_path, 1)

        asyncio.run(scenario())

    def test_a_new_adapter_and_another_alias(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=form(lora(tmp_path, 1)))
                assert (status, answer["number"], answer["workers"]) == (200, 1, {})
                push = form(lora(tmp_path, 2), alias="train", wait_s="5")
                status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=push)
                assert (status, answer["number"], answer["workers"]) == (200, 2, {})  # there was no such alias
                assert await answered_by(cluster, "bot") == id_of(tmp_path, 1)
                assert await answered_by(cluster, "bot@train") == id_of(tmp_path, 2)
                push = form(lora(tmp_path, 3), alias="train")
                await _resident_on(cluster, "bot", ["p0"])
                status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=push)
                assert (status, list(answer["workers"])) == (200, ["p0"])

        asyncio.run(scenario())

    def test_workers_that_fail(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with managing(2, 1) as cluster:
                await upload(cluster, lora(tmp_path, 1), name="bot")
                first, second = cluster.prefill
                for worker in cluster.prefill:
                    await worker.make_resident(id_of(tmp_path, 1))
                await _resident_on(cluster, "bot", ["p0", "p1"])
                first.ensure_errors = [grpc.StatusCode.UNAVAILABLE]
                status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=form(lora(tmp_path, 2)))
                assert status == 200  # one is enough: the other loads it when it is asked for it
                assert answer["workers"]["p0"]["error"]["code"] == "worker_lost"
                assert isinstance(answer["workers"]["p1"], float)
                await _resident_on(cluster, "bot", ["p1"])
                await first.make_resident(id_of(tmp_path, 2))
                await _resident_on(cluster, "bot", ["p0", "p1"])
                first.ensure_delay_s = second.ensure_delay_s = 3
                push = form(lora(tmp_path, 3), wait_s="0.3")
                status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=push)
                assert (status, answer["error"]["code"]) == (502, "push_failed")
                assert "r3" in answer["error"]["message"]
                assert (await ask(cluster, "GET", "/v1/adapters/bot"))[1]["aliases"] == {"latest": 2}

        asyncio.run(scenario())

    @pytest.mark.parametrize("wait_s", ["0", "-1", "nan", "x", "1e9"])
    def test_times_that_are_refused(self, tmp_path: Path, wait_s: str) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                push = form(lora(tmp_path, 1), wait_s=wait_s)
                status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=push)
                assert (status, answer["error"]["param"]) == (400, "wait_s")
                assert (await ask(cluster, "GET", "/v1/adapters/bot"))[0] == 404

        asyncio.run(scenario())


async def _resident_on(cluster: ClusterStandIn, name: str, workers: list[str]) -> None:
    await eventually(
        lambda: ask(cluster, "GET", f"/v1/adapters/{name}"), lambda answer: answer[1]["workers"]["host"] == workers
    )


class TestMetrics:
    def test_of_an_import_and_a_push(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                await upload(cluster, lora(tmp_path, 1), name="bot")
                await upload(cluster, {CONFIG: b"{"}, name="bot")
                await ask(cluster, "POST", "/v1/adapters/bot/push", data=form(lora(tmp_path, 2)))
                await answered_by(cluster, "bot")
                await answered_by(cluster, "bot")
                async with cluster.http.get(f"{cluster.admin_url}/metrics") as response:
                    page = await response.text()
                for line in (
                    'prelude_router_adapter_changes_total{kind="import",result="done"} 1.0',
                    'prelude_router_adapter_changes_total{kind="import",result="refused"} 1.0',
                    'prelude_router_adapter_changes_total{kind="push",result="done"} 1.0',
                    'prelude_router_adapter_change_seconds_count{kind="push"} 1.0',
                    'prelude_router_ensured_adapters_total{outcome="loaded"} 1.0',
                    'prelude_router_ensured_adapters_total{outcome="resident"} 1.0',
                ):
                    assert line in page, line

        asyncio.run(scenario())

    def test_every_change_is_counted_by_its_kind_and_result(self, tmp_path: Path) -> None:
        """One request of each kind that is done, and one that is refused; what only reads is not counted."""
        write_random_lora(tmp_path / "root" / "one", BASE, seed=1)
        one = "/v1/adapters/bot"
        load = {"lora_name": "tool", "lora_path": "one"}

        async def scenario() -> None:
            async with managing(adapter_root=tmp_path / "root") as cluster:
                done: list[tuple[str, str, str, Any]] = [
                    ("import", "POST", "/v1/adapters", {"data": form(lora(tmp_path, 1), name="bot")}),
                    ("push", "POST", f"{one}/push", {"data": form(lora(tmp_path, 2))}),
                    ("alias", "PUT", f"{one}/aliases/prod", {"json": {"revision": "r1"}}),
                    ("rollback", "POST", f"{one}/rollback", {}),
                    ("delete", "DELETE", one, {}),
                    ("restore", "POST", f"{one}/restore", {}),
                    ("prewarm", "POST", f"{one}/prewarm", {}),
                    ("pin", "POST", f"{one}/pin", {}),
                    ("unpin", "POST", f"{one}/unpin", {}),
                    ("evict", "POST", f"{one}/evict", {}),
                    ("load", "POST", "/v1/load_lora_adapter", {"json": load}),
                    ("unload", "POST", "/v1/unload_lora_adapter", {"json": load}),
                ]
                expected: dict[tuple[str, str], int] = {}
                for kind, method, path, options in done:
                    status, answer = await ask(cluster, method, path, **options)
                    assert status < 300, (kind, answer)
                    expected[kind, "done"] = 1
                    assert await changes_of(cluster) == expected
                for kind, method, path, _ in done:
                    wrong = path.replace("/bot", "/no-such-adapter")
                    assert 400 <= (await ask(cluster, method, wrong, json={"lora_path": "one"}))[0] < 500, kind
                    expected[kind, "refused"] = 1
                    assert await changes_of(cluster) == expected
                await ask(cluster, "GET", "/v1/adapters")
                await ask(cluster, "GET", one)
                assert await changes_of(cluster) == expected
                async with cluster.http.get(f"{cluster.admin_url}/metrics") as response:
                    page = await response.text()
                for kind, *_ in done:
                    assert f'adapter_change_seconds_count{{kind="{kind}"}} 1.0' in page, kind

        asyncio.run(scenario())

    def test_what_failed_or_was_left(self, tmp_path: Path) -> None:
        database = SqliteDatabase(tmp_path / "catalog")
        open_catalog(database.url).close()  # makes the tables

        async def scenario() -> None:
            async with managing(2, 1, folder=tmp_path / "router", catalog_url=database.url) as cluster:
                assert cluster.adapters._catalog is not None
                with database.down(cluster.adapters._catalog):
                    assert (await ask(cluster, "POST", "/v1/adapters/a0/rollback"))[0] == 503
                first, second = cluster.prefill
                first.ensure_errors = [grpc.StatusCode.RESOURCE_EXHAUSTED]
                assert (await ask(cluster, "POST", "/v1/adapters/a0/prewarm"))[0] == 200  # by one of two
                first.ensure_errors = [grpc.StatusCode.RESOURCE_EXHAUSTED]
                second.ensure_errors = [grpc.StatusCode.RESOURCE_EXHAUSTED]
                assert (await ask(cluster, "POST", "/v1/adapters/a0/prewarm", json={"workers": ["p0"]}))[0] == 503
                host, port = cluster.url.removeprefix("http://").split(":")
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"DELETE /v1/adapters/a0 HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
                writer.write(b"content-length: 9\r\n\r\n{")
                await writer.drain()
                await asyncio.sleep(0.2)
                writer.close()
                expected = {
                    ("rollback", "failed"): 1,
                    ("prewarm", "done"): 1,
                    ("prewarm", "failed"): 1,
                    ("delete", "left"): 1,
                }
                await eventually(lambda: changes_of(cluster), lambda found: found == expected)
                assert await answered_by(cluster, "a0") == REVISION_ID

        asyncio.run(scenario())


async def changes_of(cluster: ClusterStandIn) -> dict[tuple[str, str], int]:
    """Changes of adapters that the router has counted, by kind and result."""
    async with cluster.http.get(f"{cluster.admin_url}/metrics") as response:
        page = await response.text()
    [family] = [each for each in text_string_to_metric_families(page) if each.name == "prelude_router_adapter_changes"]
    samples = [sample for sample in family.samples if sample.name.endswith("_total")]
    return {(sample.labels["kind"], sample.labels["result"]): int(sample.value) for sample in samples}


class TestVllm:
    def test_load_and_unload(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        write_random_lora(root / "one", BASE, seed=1)
        write_random_lora(root / "deeper" / "two", BASE, seed=2)

        async def scenario() -> None:
            async with managing(adapter_root=root) as cluster:

                async def load(name: str, path: str, **fields: Any) -> tuple[int, Any]:
                    body = {"lora_name": name, "lora_path": path, **fields}
                    return await ask(cluster, "POST", "/v1/load_lora_adapter", json=body)

                async def unload(name: str) -> tuple[int, Any]:
                    return await ask(cluster, "POST", "/v1/unload_lora_adapter", json={"lora_name": name})

                assert await load("bot", "one") == (200, "Success: LoRA adapter 'bot' added successfully.")
                first = await answered_by(cluster, "bot")
                assert str(first).startswith("sha256:")
                assert (await load("bot", "deeper/two"))[0] == 400
                assert (await load("bot", str(root / "deeper" / "two"), load_inplace=True))[0] == 200
                assert await answered_by(cluster, "bot") != first
                assert await unload("bot") == (200, "Success: LoRA adapter 'bot' removed successfully.")
                assert await answered_by(cluster, "bot") == 404
                status, answer = await unload("bot")
                assert (status, answer["error"]["message"]) == (404, "The lora adapter 'bot' cannot be found.")
                assert (await load("bot", "one"))[0] == 200  # again: for vLLM it was gone
                assert await answered_by(cluster, "bot") == first
                assert (await load("base", "one"))[0] == 400
                status, answer = await ask(cluster, "POST", "/v1/load_lora_adapter", json={"lora_name": "x"})
                assert (status, answer["error"]["param"]) == (400, "lora_path")

        asyncio.run(scenario())

    @pytest.mark.parametrize("base_model", ["base", "/models/some/where", "another-model", None])
    def test_fields_of_other_tools_are_ignored(self, tmp_path: Path, base_model: str | None) -> None:
        """Those that the Kubernetes Gateway API's sidecar for dynamic LoRA sends, and ones that nobody knows."""
        write_random_lora(tmp_path / "root" / "one", BASE, seed=1)

        async def scenario() -> None:
            async with managing(adapter_root=tmp_path / "root") as cluster:
                body: dict[str, Any] = {"lora_name": "bot", "lora_path": "one", "base_model_name": base_model}
                loaded = await ask(cluster, "POST", "/v1/load_lora_adapter", json=body)
                assert loaded == (200, "Success: LoRA adapter 'bot' added successfully.")
                assert str(await answered_by(cluster, "bot")).startswith("sha256:")
                body = {**body, "load_inplace": True, "lora_int_id": "seven", "is_3d_lora_weight": {"of": [1]}}
                assert (await ask(cluster, "POST", "/v1/load_lora_adapter", json=body))[0] == 200
                assert (await ask(cluster, "POST", "/v1/unload_lora_adapter", json=body))[0] == 200
                assert await answered_by(cluster, "bot") == 404
                status, answer = await ask(cluster, "POST", "/v1/load_lora_adapter", json={**body, "lora_path": 7})
                assert (status, answer["error"]["param"]) == (400, "lora_path")  # what is read is still checked

        asyncio.run(scenario())

    def test_only_below_the_root(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        write_random_lora(root / "one", BASE, seed=1)
        write_random_lora(tmp_path / "root-2", BASE, seed=2)
        (root / "out").symlink_to(tmp_path / "root-2")
        (root / "in").symlink_to(root / "one")
        (root / "circle").symlink_to(root / "circle")
        write_random_lora(root / "two", BASE, seed=3)
        (root / "two" / WEIGHTS).unlink()
        (root / "two" / WEIGHTS).symlink_to(tmp_path / "root-2" / WEIGHTS)

        async def scenario() -> None:
            async with managing(adapter_root=root) as cluster:
                for path, expected in (
                    ("in", 200),
                    ("out", 400),
                    ("../root-2", 400),
                    (str(tmp_path / "root-2"), 400),
                    ("one/../../root-2", 400),
                    (".", 400),
                    ("", 400),
                    ("/", 400),
                    ("none", 422),
                    ("circle", 422),
                    ("nul\0", 422),
                    ("one/adapter_config.json", 422),
                    ("two", 422),  # its weights are a link to outside
                ):
                    body = {"lora_name": "bot", "lora_path": path, "load_inplace": True}
                    status, answer = await ask(cluster, "POST", "/v1/load_lora_adapter", json=body)
                    assert status == expected, (path, answer)
                    if status != 200 and not path.startswith(str(tmp_path)):
                        assert str(tmp_path) not in answer["error"]["message"], answer

        asyncio.run(scenario())

    def test_more_directories_than_are_taken(self, tmp_path: Path) -> None:
        root = write_random_lora(tmp_path / "root" / "one", BASE, seed=1).parent
        go_on = threading.Event()

        async def scenario() -> None:
            async with managing(adapter_root=root) as cluster:

                async def load(name: str) -> int:
                    body = {"lora_name": name, "lora_path": "one"}
                    async with cluster.http.post(f"{cluster.url}/v1/load_lora_adapter", json=body) as response:
                        return response.status

                for _ in range(2):  # the threads that import are busy
                    cluster.adapters._import_threads.submit(go_on.wait, 10)
                try:
                    asking = [asyncio.create_task(load(f"bot-{number}")) for number in range(6)]
                    done, waiting = await asyncio.wait(asking, timeout=1)
                    assert [each.result() for each in done] == [429, 429]
                finally:
                    go_on.set()
                assert {await each for each in waiting} == {200}
                assert await load("bot") == 200

        asyncio.run(scenario())

    def test_no_root(self) -> None:
        async def scenario() -> None:
            async with managing() as cluster:
                body = {"lora_name": "bot", "lora_path": str(TEMPLATE / "a0")}
                status, answer = await ask(cluster, "POST", "/v1/load_lora_adapter", json=body)
                assert status == 400
                assert "router.adapter_root" in answer["error"]["message"]

        asyncio.run(scenario())


def test_outages_name_no_address(tmp_path: Path) -> None:
    """What stands in the log, where the catalog and the store are, is in no answer."""
    database = SqliteDatabase(tmp_path / "catalog")
    open_catalog(database.url).close()  # makes the tables
    root = write_random_lora(tmp_path / "root" / "one", BASE, seed=1).parent

    async def scenario() -> None:
        async with managing(folder=tmp_path / "router", catalog_url=database.url, adapter_root=root) as cluster:
            files = lora(tmp_path, 2)
            load = {"lora_name": "bot", "lora_path": "one"}

            async def refused(code: str, method: str, path: str, **options: Any) -> None:
                status, answer = await ask(cluster, method, path, **options)
                assert (status, answer["error"]["code"]) == (503, code), answer
                assert not any(word in answer["error"]["message"] for word in (str(tmp_path), "sqlite", "file://"))

            assert cluster.adapters._catalog is not None
            with database.down(cluster.adapters._catalog):
                await refused("catalog_unavailable", "GET", "/v1/adapters")
                await refused("catalog_unavailable", "GET", "/v1/adapters/a0")
                await refused("catalog_unavailable", "GET", "/v1/models")
                await refused("catalog_unavailable", "POST", "/v1/adapters/a0/rollback")
                await refused("catalog_unavailable", "POST", "/v1/adapters", data=form(files, name="bot"))
                await refused("catalog_unavailable", "POST", "/v1/load_lora_adapter", json=load)
            (cluster.folder / "store").rename(cluster.folder / "away")
            (cluster.folder / "store").write_bytes(b"no folder")
            await refused("adapter_store_unavailable", "POST", "/v1/adapters", data=form(files, name="bot"))
            await refused("adapter_store_unavailable", "POST", "/v1/load_lora_adapter", json=load)

    asyncio.run(scenario())


def test_where_adapters_are_not_managed() -> None:
    verbs = ("restore", "rollback", "push", "prewarm", "pin", "unpin", "evict")
    calls = [
        ("GET", "/v1/adapters"),
        ("POST", "/v1/adapters"),
        ("GET", "/v1/adapters/a0"),
        ("GET", "/v1/adapters/a0/export"),
        ("DELETE", "/v1/adapters/a0"),
    ]
    calls += [("GET", "/v1/adapters/a0/aliases/prod"), ("PUT", "/v1/adapters/a0/aliases/prod")]
    calls += [*(("POST", f"/v1/adapters/a0/{verb}") for verb in verbs)]
    calls += [("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter")]

    async def scenario() -> None:
        async with running_cluster(directories={"a0": DIRECTORIES["a0"]}) as cluster:
            for method, path in calls:
                body = {"lora_name": "a0"} if method == "POST" else None
                status, answer = await ask(cluster, method, path, json=body)
                assert (status, answer["error"]["code"]) == (403, "management_off"), path
                assert "router.management" in answer["error"]["message"]
            assert await answered_by(cluster, "a0") == REVISION_ID

    asyncio.run(scenario())
