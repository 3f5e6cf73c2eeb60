"""Uploads of adapters over HTTP: what is accepted, what is refused, and that a failed one leaves nothing."""

from __future__ import annotations

import asyncio
import glob
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.adapters.random_adapters import write_random_reft
from support.router_stand_ins import (
    BASE,
    LIMITS,
    eventually,
)
from support.routers.management_calls import CONFIG, WEIGHTS, answered_by, ask, files_of, id_of, lora, managing, upload


def left_over() -> set[str]:
    return set(glob.glob(f"{tempfile.gettempdir()}/prelude-work-upload-*"))


_FILE_BEGINS = b'--x\r\nContent-Disposition: form-data; name="file"; filename="adapter_config.json"\r\n\r\n{}'


class TestUpload:
    @pytest.mark.parametrize("name", ["bot", "acme/bot"])
    async def test_a_new_adapter_is_served_at_once(self, tmp_path: Path, name: str) -> None:
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

    async def test_another_layout(self, tmp_path: Path) -> None:
        files = files_of(write_random_reft(tmp_path / "reft", BASE, 3))
        async with managing() as cluster:
            status, answer = await upload(cluster, files, name="reft")
            assert (status, answer["kinds"]) == (201, ["reft"])

    async def test_an_alias_moves_instead_of_latest(self, tmp_path: Path) -> None:
        async with managing() as cluster:
            await upload(cluster, lora(tmp_path, 1), name="bot")
            status, answer = await upload(cluster, lora(tmp_path, 2), name="bot", alias="canary")
            assert (status, answer["number"], answer["alias"]) == (201, 2, "canary")
            assert await answered_by(cluster, "bot") == id_of(tmp_path, 1)
            assert await answered_by(cluster, "bot@canary") == id_of(tmp_path, 2)
            status, answer = await upload(cluster, lora(tmp_path, 3), name="bot", alias="r7")
            assert (status, answer["error"]["param"]) == (400, "alias")
            assert (await ask(cluster, "GET", "/v1/adapters/bot"))[1]["num_revisions"] == 2

    async def test_files_that_are_refused(self, tmp_path: Path) -> None:
        names = ["../evil.safetensors", "a/evil.json", "..\\evil.json", "/etc/evil.json", ".evil.json", ""]
        names += ["%2e%2e%2fevil.json", "x" * 300 + ".json", "adapter_model.bin", "evil.py", "évil.json"]
        changes = [({name: b"x"}, 400, "invalid_upload") for name in names] + [
            ({CONFIG: b"{"}, 422, "adapter_malformed"),
            ({WEIGHTS: b"short"}, 422, "adapter_malformed"),
            ({WEIGHTS: b""}, 422, "adapter_malformed"),
            ({WEIGHTS: bytes(LIMITS.max_bytes + 9 * 1024**2)}, 413, "body_too_large"),
        ]
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

    async def test_a_size_that_is_not_declared(self, tmp_path: Path) -> None:
        """Chunked: the limit counts what comes."""
        head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.safetensors"\r\n\r\n'

        async def chunks() -> Any:
            yield head
            for _ in range(200):
                yield bytes(1024**2)

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
    async def test_fields_that_are_refused(
        self, tmp_path: Path, fields: dict[str, str], status: int, param: str | None
    ) -> None:
        async with managing() as cluster:
            found, answer = await upload(cluster, lora(tmp_path, 1), **fields)
            assert (found, answer["error"]["param"]) == (status, param), answer

    async def test_bodies_that_are_no_upload(self) -> None:
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
        async with managing() as cluster:

            async def refused(content_type: str, body: bytes) -> None:
                headers = {"content-type": content_type}
                status, answer = await ask(cluster, "POST", "/v1/adapters", data=body, headers=headers)
                assert (status, answer["error"]["code"]) == (400, "invalid_upload"), body

            await refused("application/json", b"{}")
            await refused("multipart/form-data", part + b"--x--")
            for body in bodies:
                await refused("multipart/form-data; boundary=x", body)

    async def test_an_interrupted_upload_leaves_nothing(self) -> None:
        head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.safetensors"\r\n\r\n'
        async with managing() as cluster:
            before = left_over()
            host, port = cluster.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"POST /v1/adapters HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3000000\r\n"
                b"content-type: multipart/form-data; boundary=x\r\n\r\n" + head + bytes(2 * 1024**2)
            )
            await writer.drain()
            (folder,) = await eventually(
                lambda: asyncio.sleep(0, left_over() - before), lambda new: any(map(glob.glob, _files_in(new)))
            )
            writer.close()
            await eventually(lambda: asyncio.sleep(0, left_over()), lambda found: folder not in found)
            assert (await cluster.post(prompt="Hi"))[0] == 200

    async def test_an_upload_that_stops_has_a_deadline(self) -> None:
        async def chunks() -> Any:
            yield b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\nbo'
            await asyncio.sleep(5)

        async with managing(body_timeout_s=0.2) as cluster:
            before = left_over()
            headers = {"content-type": "multipart/form-data; boundary=x"}
            status, answer = await ask(cluster, "POST", "/v1/adapters", data=chunks(), headers=headers)
            assert (status, answer["error"]["code"]) == (408, "body_too_slow")
            assert left_over() <= before

    @pytest.mark.slow
    def test_an_upload_that_drips_has_a_deadline(self) -> None:
        """Its gaps are short, but it would hold its slot for as long as all of an upload may take."""

        async def chunks() -> Any:
            yield _FILE_BEGINS
            while True:
                await asyncio.sleep(0.02)
                yield b" "

        async def scenario() -> None:
            async with managing(body_timeout_s=1.0) as cluster:
                before = left_over()
                headers = {"content-type": "multipart/form-data; boundary=x"}
                try:
                    status, answer = await ask(cluster, "POST", "/v1/adapters", data=chunks(), headers=headers)
                    assert (status, answer["error"]["code"]) == (408, "body_too_slow")
                except aiohttp.ClientError:  # the answer can be lost where the sender goes on sending
                    pass
                await eventually(lambda: asyncio.sleep(0, left_over()), lambda found: found <= before)

        asyncio.run(asyncio.wait_for(scenario(), 60))

    @pytest.mark.slow
    async def test_a_router_that_stops_says_so(self) -> None:
        async def chunks() -> Any:
            yield _FILE_BEGINS
            await asyncio.sleep(5)

        async with managing(drain_timeout_s=0.5) as cluster:
            headers, before = {"content-type": "multipart/form-data; boundary=x"}, left_over()
            asking = asyncio.create_task(ask(cluster, "POST", "/v1/adapters", data=chunks(), headers=headers))
            await eventually(lambda: asyncio.sleep(0, left_over() - before), bool)
            cluster.server.should_exit = True
            status, answer = await asking
            assert (status, answer["error"]["code"]) == (503, "router_stopping")
            await eventually(lambda: asyncio.sleep(0, left_over()), lambda found: found <= before)

    async def test_more_uploads_than_are_taken(self, tmp_path: Path) -> None:
        go_on = asyncio.Event()

        async def chunks() -> Any:
            yield b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\nbot\r\n' + _FILE_BEGINS
            await go_on.wait()
            yield b"\r\n--x--\r\n"

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

    async def test_uploads_at_once_of_the_same_name(self, tmp_path: Path) -> None:
        async with managing() as cluster:
            all_files = [lora(tmp_path, seed) for seed in range(4)]
            answers = await asyncio.gather(*(upload(cluster, files, name="bot") for files in all_files))
            assert sorted(answer["number"] for _, answer in answers) == [1, 2, 3, 4]
            for number, (_, answer) in enumerate(answers):
                assert answer["revision"] == id_of(tmp_path, number)
                assert await answered_by(cluster, f"bot@r{answer['number']}") == answer["revision"]


def _files_in(folders: set[str]) -> list[str]:
    return [f"{folder}/*" for folder in folders]
