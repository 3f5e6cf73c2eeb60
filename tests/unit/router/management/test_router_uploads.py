"""Uploads of adapters over HTTP: what is accepted, what is refused, and that a failed one leaves nothing.

And their slots: what one tenant can hold, and what is refused before files have arrived.
"""

import asyncio
import glob
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.router_stand_ins import LIMITS, ClusterStandIn, eventually, until
from support.routers.keyed_cluster import KeyedCluster, keyed_cluster
from support.routers.management_calls import (
    CONFIG,
    WEIGHTS,
    answered_by,
    ask,
    files_of,
    form,
    id_of,
    lora,
    managing,
    upload,
)

from router.errors import InvalidUpload
from router.management.upload_receiver import Upload, UploadReceiver

MANAGEMENT = True

MULTIPART = {"content-type": "multipart/form-data; boundary=x"}
FILE_BEGINS = b'--x\r\nContent-Disposition: form-data; name="file"; filename="adapter_config.json"\r\n\r\n{}'
WEIGHTS_BEGIN = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.safetensors"\r\n\r\n'
NAME_BEGINS = b'--x\r\nContent-Disposition: form-data; name="name"'


def left_over() -> set[str]:
    return set(glob.glob(f"{tempfile.gettempdir()}/prelude-work-upload-*"))


def named(name: str) -> bytes:
    return b"%b\r\n\r\n%b\r\n" % (NAME_BEGINS, name.encode())


async def sent(cluster: ClusterStandIn, chunks: Any) -> tuple[int, Any]:
    return await ask(cluster, "POST", "/v1/adapters", data=chunks, headers=MULTIPART)


class TestUpload:
    @pytest.mark.parametrize("name", ["bot", "acme/bot"])
    async def test_a_new_adapter_is_served_at_once(self, tmp_path: Path, name: str, cluster: ClusterStandIn) -> None:
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

    async def test_an_alias_moves_instead_of_latest(self, tmp_path: Path, cluster: ClusterStandIn) -> None:
        await upload(cluster, lora(tmp_path, 1), name="bot")
        status, answer = await upload(cluster, lora(tmp_path, 2), name="bot", alias="canary")
        assert (status, answer["number"], answer["alias"]) == (201, 2, "canary")
        assert await answered_by(cluster, "bot") == id_of(tmp_path, 1)
        assert await answered_by(cluster, "bot@canary") == id_of(tmp_path, 2)
        status, answer = await upload(cluster, lora(tmp_path, 3), name="bot", alias="r7")
        assert (status, answer["error"]["param"]) == (400, "alias")
        assert (await ask(cluster, "GET", "/v1/adapters/bot"))[1]["num_revisions"] == 2

    async def test_files_that_are_refused(self, tmp_path: Path, cluster: ClusterStandIn) -> None:
        names = ["../evil.safetensors", "a/evil.json", "..\\evil.json", "/etc/evil.json", ".evil.json", ""]
        names += ["%2e%2e%2fevil.json", "x" * 300 + ".json", "adapter_model.bin", "evil.py", "évil.json"]
        changes = [({name: b"x"}, 400, "invalid_upload") for name in names] + [
            ({CONFIG: b"{"}, 422, "adapter_malformed"),
            ({WEIGHTS: b"short"}, 422, "adapter_malformed"),
            ({WEIGHTS: bytes(LIMITS.max_bytes + 9 * 1024**2)}, 413, "body_too_large"),
        ]
        before = left_over()
        last = cluster.adapters._catalog.last_change()
        for change, status, code in changes:
            found, answer = await upload(cluster, {**lora(tmp_path, 1), **change}, name="bot")
            assert (found, answer["error"]["code"]) == (status, code), change
            assert tempfile.gettempdir() not in answer["error"]["message"]
            assert left_over() <= before
        assert cluster.adapters._catalog.last_change() == last
        assert not list((cluster.folder / "store").rglob("evil*"))
        assert not glob.glob(f"{tempfile.gettempdir()}/evil*")

    @pytest.mark.parametrize(
        ("chunk", "gap_s", "status", "code"),
        [
            (bytes(1024**2), 0, 413, "body_too_large"),  # no size is declared: the limit counts what comes
            pytest.param(b" ", 0.02, 408, "body_too_slow", marks=pytest.mark.slow),  # else it would hold its slot
            (b" ", 60.0, 408, "body_too_slow"),
        ],
    )
    async def test_an_upload_that_does_not_end(self, chunk: bytes, gap_s: float, status: int, code: str) -> None:
        async def chunks() -> Any:
            yield WEIGHTS_BEGIN
            while True:
                await asyncio.sleep(gap_s)
                yield chunk

        async with asyncio.timeout(120), managing(body_timeout_s=1.0 if gap_s else 60.0) as cluster:
            before = left_over()
            try:
                found, answer = await sent(cluster, chunks())
                assert (found, answer["error"]["code"]) == (status, code)
            except aiohttp.ClientError:  # the answer can be lost where the sender goes on sending
                pass
            await until(lambda: left_over() <= before)

    async def test_fields_that_are_refused(self, tmp_path: Path, cluster: ClusterStandIn) -> None:
        files = lora(tmp_path, 1)
        for fields, param in (
            ({}, "name"),
            ({"name": "../x"}, None),
            ({"name": "base"}, "name"),
            ({"name": "bot", "tenant": "x"}, "tenant"),
            ({"name": "bot", "alias": "x" * 2000}, "alias"),
        ):
            status, answer = await upload(cluster, files, **fields)
            assert (status, answer["error"]["param"]) == (400, param), answer

    async def test_bodies_that_are_no_upload(self, cluster: ClusterStandIn, caplog: pytest.LogCaptureFixture) -> None:
        """The parser warns of most of them: a client could fill the log with lines."""
        part, nameless = named("bot"), b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n--x--\r\n"
        long = b"--x\r\n" + b"A: b\r\n" * 100 + b"\r\n"
        bodies = [b"nonsense", b"", nameless, long, part, part + b"--x", part + b"--x--"]
        bodies += [NAME_BEGINS + b"\r\nX", b"--x\r\n: \r\n", b"--x--\r\n", b"--xx"]
        cases = [(MULTIPART["content-type"], each) for each in bodies]
        cases += [("application/json", b"{}"), ("multipart/form-data", part + b"--x--")]
        for content_type, body in cases:
            headers = {"content-type": content_type}
            status, answer = await ask(cluster, "POST", "/v1/adapters", data=body, headers=headers)
            assert (status, answer["error"]["code"]) == (400, "invalid_upload"), body
        assert not [each for each in caplog.records if each.name.startswith("python_multipart")]

    async def test_an_interrupted_upload_leaves_nothing(self, cluster: ClusterStandIn) -> None:
        before = left_over()
        head = b"POST /v1/adapters HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3000000\r\ncontent-type: "
        head += MULTIPART["content-type"].encode() + b"\r\n\r\n"
        _, writer = await cluster.open(head + WEIGHTS_BEGIN + bytes(2 * 1024**2))
        await writer.drain()
        (folder,) = await eventually(
            lambda: asyncio.sleep(0, left_over() - before), lambda new: any(glob.glob(f"{each}/*") for each in new)
        )
        writer.close()
        await eventually(lambda: asyncio.sleep(0, left_over()), lambda found: folder not in found)
        assert (await cluster.post(prompt="Hi"))[0] == 200

    @pytest.mark.slow
    async def test_a_router_that_stops_says_so(self) -> None:
        async def chunks() -> Any:
            yield FILE_BEGINS
            await asyncio.sleep(5)

        async with managing(drain_timeout_s=0.5) as cluster:
            before = left_over()
            asking = asyncio.create_task(sent(cluster, chunks()))
            await until(lambda: left_over() - before)
            cluster.server.should_exit = True
            status, answer = await asking
            assert (status, answer["error"]["code"]) == (503, "router_stopping")
            await eventually(lambda: asyncio.sleep(0, left_over()), lambda found: found <= before)

    async def test_uploads_at_once_of_the_same_name(self, tmp_path: Path, cluster: ClusterStandIn) -> None:
        all_files = [lora(tmp_path, seed) for seed in range(4)]
        answers = await asyncio.gather(*(upload(cluster, files, name="bot") for files in all_files))
        assert sorted(answer["number"] for _, answer in answers) == [1, 2, 3, 4]
        for number, (_, answer) in enumerate(answers):
            assert answer["revision"] == id_of(tmp_path, number)
            assert await answered_by(cluster, f"bot@r{answer['number']}") == answer["revision"]


# ---- slots ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def unfinished(keyed: KeyedCluster, key: str, num: int, start: bytes) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Uploads whose clients have sent `start` and send the end after the block."""
    go_on, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def chunks() -> Any:
        yield start
        begun.release()
        await go_on.wait()
        yield b"\r\n--x--\r\n"

    asking = [
        asyncio.create_task(keyed.ask(key, "POST", "/v1/adapters", data=chunks(), headers=MULTIPART))
        for _ in range(num)
    ]
    for _ in range(num):
        await begun.acquire()
    try:
        yield asking
    finally:
        go_on.set()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_one_tenant_leaves_slots_for_others(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path, body_timeout_s=300) as keyed:
        acme, beta = await keyed.key("acme"), await keyed.key("beta")
        async with unfinished(keyed, acme, 4, named("acme/bot") + FILE_BEGINS) as asking:
            done = [await each for each in islice(asyncio.as_completed(asking, timeout=100), 2)]
            status, answer = done[0]
            assert (status, answer["error"]["code"]) == (429, "too_many_uploads")
            assert "tenant acme in flight have 2 uploads; with 1 more" in answer["error"]["message"]
            own = form(lora(tmp_path, 1), name="beta/own")
            status, answer = await keyed.ask(beta, "POST", "/v1/adapters", data=own)
            assert status == 201, answer
        assert sorted([status for status, _ in await asyncio.gather(*asking)]) == [422, 422, 429, 429]


async def test_what_needs_no_files_is_refused_before_they_have_arrived(tmp_path: Path) -> None:
    quotas = {"default": {"pushes_per_hour": 1}}
    async with keyed_cluster(tmp_path, quotas=quotas, body_timeout_s=300) as keyed:
        beta = await keyed.key("beta")
        files = form(lora(tmp_path, 1), name="beta/own")
        assert (await keyed.ask(beta, "POST", "/v1/adapters", data=files))[0] == 201
        for start, status, code in (
            (named("acme/bot"), 404, "adapter_not_found"),  # another tenant's
            (FILE_BEGINS + b"\r\n" + named("acme/bot"), 404, "adapter_not_found"),  # the name comes after a file
            (named("a b"), 400, "invalid_adapter_reference"),
            (named("beta/own"), 429, "rate_limit_exceeded"),
        ):
            async with unfinished(keyed, beta, 1, start + FILE_BEGINS) as asking:
                done, _ = await asyncio.wait(asking, timeout=100)  # the upload's own deadline is 300 s
                found, answer = done.pop().result()
                assert (found, answer["error"]["code"]) == (status, code), answer


# ---- a part that is not sound does not fill memory ------------------------------------------------------------------


@pytest.mark.parametrize("part", ["on_header_field", "on_header_value"])
def test_a_header_of_a_part_is_bounded_whatever_the_parser_does(part: str) -> None:
    take = UploadReceiver(Upload(), ("name",), None).callbacks[part]
    take(bytes(8192), 0, 8192)
    with pytest.raises(InvalidUpload, match="over 8192 bytes"):
        take(b"x", 0, 1)
