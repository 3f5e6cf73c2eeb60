"""Slots of uploads: what one tenant can hold, and what is refused before files have arrived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.routers.keyed_cluster import KeyedCluster, keyed_cluster
from support.routers.management_calls import form as form_of
from support.routers.management_calls import lora

HEADERS = {"content-type": "multipart/form-data; boundary=x"}
FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="adapter_config.json"\r\n\r\n{}'
END = b"\r\n--x--\r\n"


def named(name: str) -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\n%b\r\n' % name.encode()


@asynccontextmanager
async def unfinished(keyed: KeyedCluster, key: str, num: int, start: bytes) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Uploads whose clients have sent `start` and send the end after the block."""
    go_on, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def chunks() -> Any:
        yield start
        begun.release()
        await go_on.wait()
        yield END

    asking = [
        asyncio.create_task(keyed.ask(key, "POST", "/v1/adapters", data=chunks(), headers=HEADERS)) for _ in range(num)
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
        async with unfinished(keyed, acme, 4, named("acme/bot") + FILE) as asking:
            done = [await each for each in islice(asyncio.as_completed(asking, timeout=100), 2)]
            status, answer = done[0]
            assert (status, answer["error"]["code"]) == (429, "too_many_uploads")
            assert "tenant acme in flight have 2 uploads; with 1 more" in answer["error"]["message"]
            status, answer = await keyed.ask(
                beta, "POST", "/v1/adapters", data=form_of(lora(tmp_path, 1), name="beta/own")
            )
            assert status == 201, answer
        assert sorted([status for status, _ in await asyncio.gather(*asking)]) == [422, 422, 429, 429]


@pytest.mark.parametrize(
    ("start", "status", "code"),
    [
        (named("acme/bot") + FILE, 404, "adapter_not_found"),  # another tenant's
        (FILE + b"\r\n" + named("acme/bot") + FILE, 404, "adapter_not_found"),  # the name comes after a file
        (named("base") + FILE, 404, "adapter_not_found"),
        (named("a b") + FILE, 400, "invalid_adapter_reference"),
    ],
)
async def test_a_wrong_name_is_refused_before_the_files_have_arrived(
    tmp_path: Path, start: bytes, status: int, code: str
) -> None:
    async with keyed_cluster(tmp_path, body_timeout_s=300) as keyed:
        beta = await keyed.key("beta")
        async with unfinished(keyed, beta, 1, start) as asking:
            done, _ = await asyncio.wait(asking, timeout=100)  # the upload's own deadline is 300 s
            found, answer = done.pop().result()
            assert (found, answer["error"]["code"]) == (status, code), answer


async def test_an_exhausted_quota_of_pushes_is_refused_before_the_files_have_arrived(tmp_path: Path) -> None:
    quotas = {"default": {"pushes_per_hour": 1}}
    async with keyed_cluster(tmp_path, quotas=quotas, body_timeout_s=300) as keyed:
        beta = await keyed.key("beta")
        files = form_of(lora(tmp_path, 1), name="beta/own")
        assert (await keyed.ask(beta, "POST", "/v1/adapters", data=files))[0] == 201
        async with unfinished(keyed, beta, 1, named("beta/own") + FILE) as asking:
            done, _ = await asyncio.wait(asking, timeout=100)
            status, answer = done.pop().result()
            assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded"), answer
