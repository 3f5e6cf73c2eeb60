"""Exports over HTTP: what they hold, and that nothing stays of them however they end."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import sys
import tarfile
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.router_stand_ins import BASE, REVISION_ID, ClusterStandIn, eventually, running_cluster
from support.router_stand_ins import adapters as adapters_of_tests
from support.routers.management_calls import ask, files_of, form, lora, upload

from adapters.formats import Limits
from adapters.library import AdapterLibrary
from samples.random_adapters import write_random_lora

BOT = "/v1/adapters/bot/export"


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def managing(folder: Path, **config: object):
    return running_cluster(management=True, folder=folder / "router", **config)  # type: ignore[arg-type]


def untarred(data: bytes, folder: Path) -> Path:
    """The directory that an archive has."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")
    (directory,) = folder.iterdir()
    return directory


def what_is_left(work: Path) -> list[str]:
    """Files of exports that are open or have a name, and threads that are at one."""
    left = [str(path) for path in work.glob("prelude-work-export-*")]
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            left.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the one that lists them
            continue
    left = [each for each in left if "prelude-work-export" in each]
    for name, frame in sys._current_frames().items():
        while frame is not None:
            if frame.f_code.co_filename.endswith(
                ("router/management/tar_archive.py", "router/management/adapters_export.py")
            ):
                left.append(f"thread {name} in {frame.f_code.co_name}")
            frame = frame.f_back  # type: ignore[assignment]
    return left


async def nothing_is_left(work: Path) -> None:
    await eventually(lambda: asyncio.sleep(0, what_is_left(work)), lambda left: left == [])


class TestArchive:
    @pytest.mark.parametrize("name", ["bot", "acme/bot"])
    def test_it_goes_out_and_comes_in_again_as_the_same_revision(self, tmp_path: Path, work: Path, name: str) -> None:
        async def scenario() -> None:
            async with managing(tmp_path) as cluster:
                for seed in (1, 2):
                    status, made = await upload(cluster, lora(tmp_path, seed, rank=4, alpha=4), name=name)
                    assert status == 201
                async with cluster.http.get(f"{cluster.url}/v1/adapters/{name}/export") as response:
                    data = await response.read()
                    assert response.status == 200, data
                    assert response.content_type == "application/x-tar"
                    assert response.headers["x-prelude-adapter"] == name
                    assert response.headers["x-prelude-revision"] == made["revision"]
                    plain = name.replace("/", "-")
                    assert response.headers["content-disposition"] == f'attachment; filename="{plain}-r2.tar"'
                    assert int(response.headers["content-length"]) == len(data)
                directory = untarred(data, tmp_path / "out")
                assert directory.name == f"{plain}-r2"
                status, again = await upload(cluster, files_of(directory), name="other")
                assert (status, again["revision"], again["number"]) == (201, made["revision"], 1)

                def export(library: AdapterLibrary) -> None:
                    library.export(name, tmp_path / "by-library")

                await cluster.adapters.from_library(export, 10)
                assert files_of(directory) == files_of(tmp_path / "by-library")
                await nothing_is_left(work)

        asyncio.run(scenario())

    def test_which_revision(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with managing(tmp_path) as cluster:
                revisions = [(await upload(cluster, lora(tmp_path, seed), name="bot"))[1] for seed in (1, 2)]
                ids = [each["revision"] for each in revisions]
                await ask(cluster, "PUT", "/v1/adapters/bot/aliases/prod", json={"revision": "r1"})
                for reference, expected in (
                    ("prod", ids[0]),
                    ("r1", ids[0]),
                    (ids[0], ids[0]),
                    ("bot@prod", ids[0]),
                    ("latest", ids[1]),
                    ("bot", ids[1]),
                ):
                    params = {"reference": reference}
                    async with cluster.http.get(f"{cluster.url}{BOT}", params=params) as response:
                        assert response.headers["x-prelude-revision"] == expected, reference
                        number = ids.index(expected) + 1
                        assert f'"bot-r{number}.tar"' in response.headers["content-disposition"]

        asyncio.run(scenario())

    def test_its_head(self, tmp_path: Path, work: Path) -> None:
        async def scenario() -> None:
            async with managing(tmp_path) as cluster:
                async with cluster.http.head(f"{cluster.url}/v1/adapters/a0/export") as response:
                    assert response.status == 200
                    assert response.headers["x-prelude-revision"] == REVISION_ID
                    declared = response.headers["content-length"]
                async with cluster.http.get(f"{cluster.url}/v1/adapters/a0/export") as response:
                    assert len(await response.read()) == int(declared)
                await nothing_is_left(work)

        asyncio.run(scenario())


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "status", "code", "said"),
        [
            ("bto/export", 404, "adapter_not_found", "there is no adapter 'bto'; did you mean 'bot'"),
            ("bot/export?reference=prod", 404, "adapter_not_found", "no alias 'prod'"),
            ("bot/export?reference=r9", 404, "adapter_not_found", "its newest is r1"),
            ("bot/export?reference=a0@r1", 400, "invalid_field", "of another adapter"),
            ("bot/export?reference=a b", 400, "invalid_adapter_reference", "neither an alias nor a revision"),
            ("a/b/c/export", 400, "invalid_adapter_reference", "is not an adapter name"),
            ("bot/export?revision=r1", 400, "invalid_field", "known are: reference"),
        ],
    )
    def test_what_is_not_there(self, tmp_path: Path, path: str, status: int, code: str, said: str) -> None:
        async def scenario() -> None:
            async with managing(tmp_path) as cluster:
                await upload(cluster, lora(tmp_path, 1), name="bot")
                found, answer = await ask(cluster, "GET", f"/v1/adapters/{path}")
                assert (found, answer["error"]["code"]) == (status, code)
                assert said in answer["error"]["message"]

        asyncio.run(scenario())

    def test_a_revision_that_no_store_has(self, tmp_path: Path, work: Path) -> None:
        async def scenario() -> None:
            async with managing(tmp_path) as cluster:
                push = form(lora(tmp_path, 1), memory_only="true")
                assert (await ask(cluster, "POST", "/v1/adapters/bot/push", data=push))[0] == 200
                status, answer = await ask(cluster, "GET", BOT)
                assert (status, answer["error"]["code"]) == (404, "adapter_revision_not_stored")
                assert "bot@r1 is kept in workers' memory only" in answer["error"]["message"]
                assert what_is_left(work) == []

        asyncio.run(scenario())

    def test_a_store_that_is_away_or_has_lost_it(self, tmp_path: Path, work: Path) -> None:
        async def scenario() -> None:
            async with managing(tmp_path) as cluster:
                await upload(cluster, lora(tmp_path, 1), name="bot")
                store = cluster.folder / "store"
                store.rename(cluster.folder / "away")
                store.write_bytes(b"no folder")
                async with cluster.http.get(f"{cluster.url}{BOT}") as response:
                    error = (await response.json())["error"]
                    assert (response.status, error["code"]) == (503, "adapter_store_unavailable")
                    assert int(response.headers["retry-after"]) >= 1
                    assert str(tmp_path) not in error["message"]
                store.unlink()
                (cluster.folder / "away").rename(store)
                for path in (store / "revisions").rglob("*"):
                    if path.is_file():
                        path.unlink()
                status, answer = await ask(cluster, "GET", BOT)
                assert (status, answer["error"]["code"]) == (404, "adapter_revision_not_stored")
                assert str(tmp_path) not in answer["error"]["message"]
                await nothing_is_left(work)

        asyncio.run(scenario())

    @pytest.mark.parametrize("stops", [False, True])
    def test_nobody_waits_any_more(
        self, tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
    ) -> None:
        """A store that is too slow, or a router that stops, while a thread prepares the archive."""
        go_on, is_done, original = threading.Event(), threading.Event(), AdapterLibrary.export_revision

        def slow(library: AdapterLibrary, *arguments: object) -> None:
            original(library, *arguments)  # type: ignore[arg-type]
            go_on.wait(120)
            is_done.set()

        monkeypatch.setattr(AdapterLibrary, "export_revision", slow)

        async def scenario() -> None:
            timeout_s = 600 if stops else 0.5
            async with managing(tmp_path, upload_timeout_s=timeout_s, drain_timeout_s=0.5) as cluster:
                asking = asyncio.create_task(ask(cluster, "GET", "/v1/adapters/a0/export"))
                await eventually(lambda: asyncio.sleep(0, list(work.glob("prelude-work-export-*/adapter"))), bool)
                assert (await cluster.get("/ready"))[0] == 200  # the event loop goes on
                cluster.server.should_exit = stops
                status, answer = await asking
                code = "router_stopping" if stops else "adapter_store_unavailable"
                assert (status, answer["error"]["code"]) == (503, code)
                assert not is_done.is_set()
                go_on.set()
                await nothing_is_left(work)
                assert is_done.is_set()

        asyncio.run(scenario())

    def test_clients_that_leave_before_it_is_there(
        self, tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And whoever imports meanwhile does not wait for them."""
        go_on, original = threading.Event(), AdapterLibrary.export_revision

        def slow(library: AdapterLibrary, *arguments: object) -> None:
            go_on.wait(120)
            original(library, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(AdapterLibrary, "export_revision", slow)

        async def scenario() -> None:
            async with managing(tmp_path) as cluster:
                files = lora(tmp_path, 1)
                asking = [asyncio.create_task(ask(cluster, "GET", "/v1/adapters/a0/export")) for _ in range(3)]
                folders = lambda: asyncio.sleep(0, list(work.glob("prelude-work-export-*")))  # noqa: E731
                await eventually(folders, lambda found: len(found) == 2)  # the third one waits for a thread
                async with asyncio.timeout(30):
                    assert (await upload(cluster, files, name="bot"))[0] == 201
                for each in asking:
                    each.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
                go_on.set()
                await nothing_is_left(work)
                async with cluster.http.get(f"{cluster.url}{BOT}") as response:
                    assert response.status == 200

        asyncio.run(scenario())


class TestClients:
    """Those that take a part of an archive which is larger than what sockets hold."""

    @pytest.fixture
    def large(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(adapters_of_tests, "LIMITS", Limits(max_rank=8192, max_bytes=100 * 1024**2))
        return write_random_lora(tmp_path / "large", BASE, seed=1, rank=8192, modules=["q_proj", "down_proj"])

    @asynccontextmanager
    async def exporting(self, folder: Path, large: Path, **config: object) -> AsyncIterator[ClusterStandIn]:
        async with managing(folder, **config) as cluster:

            def add(library: AdapterLibrary) -> None:
                library.import_directory("bot", large)

            await cluster.adapters.from_library(add, 30)
            yield cluster

    @staticmethod
    async def begun(cluster: ClusterStandIn) -> asyncio.StreamWriter:
        """A client that has the beginning of an archive and reads no further."""
        host, port = cluster.url.removeprefix("http://").split(":")
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        own.setblocking(False)
        await asyncio.get_running_loop().sock_connect(own, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=own, limit=64 * 1024)
        writer.write(f"GET {BOT} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        assert len(await reader.readexactly(100_000)) == 100_000
        return writer

    @pytest.mark.parametrize("abruptly", [False, True])
    def test_one_that_leaves_half_way(self, tmp_path: Path, work: Path, large: Path, abruptly: bool) -> None:
        async def scenario() -> None:
            async with self.exporting(tmp_path, large) as cluster:
                writer = await self.begun(cluster)
                found = await eventually(lambda: asyncio.sleep(0, what_is_left(work)), lambda left: len(left) == 2)
                assert all(each.endswith("(deleted)") for each in found)  # a router that is killed now leaves nothing
                if abruptly:
                    writer.transport.abort()
                else:
                    writer.close()
                await nothing_is_left(work)
                async with cluster.http.get(f"{cluster.url}{BOT}") as response:
                    assert len(await response.read()) == int(response.headers["content-length"]) > 8 * 1024**2
                await nothing_is_left(work)

        asyncio.run(scenario())

    @pytest.mark.parametrize("config", [{"body_timeout_s": 0.3}, {"upload_timeout_s": 3.0}])
    @pytest.mark.slow
    def test_one_that_does_not_read_on(self, tmp_path: Path, work: Path, large: Path, config: dict[str, float]) -> None:
        async def scenario() -> None:
            async with self.exporting(tmp_path, large, **config) as cluster:
                writer = await self.begun(cluster)
                assert what_is_left(work) != []
                await nothing_is_left(work)
                writer.close()

        asyncio.run(scenario())

    def test_more_than_are_taken(self, tmp_path: Path, work: Path, large: Path) -> None:
        async def scenario() -> None:
            async with self.exporting(tmp_path, large) as cluster:
                clients = [await self.begun(cluster) for _ in range(4)]
                async with cluster.http.get(f"{cluster.url}{BOT}") as response:
                    error = (await response.json())["error"]
                    assert (response.status, error["code"]) == (429, "too_many_exports")
                    assert "4 exports" in error["message"]
                    assert response.headers["retry-after"]
                assert (await upload(cluster, lora(tmp_path, 2), name="other"))[0] == 201  # which is not in their way
                clients.pop().close()

                async def status() -> int:
                    async with cluster.http.get(f"{cluster.url}/v1/adapters/other/export") as response:
                        return response.status

                await eventually(status, lambda found: found == 200)
                for client in clients:
                    client.close()
                await nothing_is_left(work)

        asyncio.run(scenario())

    def test_a_router_that_stops(self, tmp_path: Path, work: Path, large: Path) -> None:
        async def scenario() -> None:
            async with self.exporting(tmp_path, large, drain_timeout_s=0.5) as cluster:
                writer = await self.begun(cluster)
                cluster.server.should_exit = True
                await nothing_is_left(work)
                writer.close()

        asyncio.run(scenario())
