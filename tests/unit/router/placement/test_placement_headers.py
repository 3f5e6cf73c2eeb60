"""Where a request went: the headers of answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.router_stand_ins import MODEL, REVISION_ID, eventually, running_cluster


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("debug_header", [False, True])
async def test_the_header_is_answered_where_it_is_allowed(stream: bool, debug_header: bool) -> None:
    async with running_cluster(debug_header=debug_header) as cluster:
        url, body = f"{cluster.url}/v1/completions", {"model": MODEL, "prompt": "Hi", "adapter": "a0"}
        for asks in (True, False):
            headers = {"x-prelude-debug": "placement"} if asks else {}
            async with cluster.http.post(url, json={**body, "stream": stream}, headers=headers) as answer:
                assert answer.status == 200
                await answer.read()
                found = answer.headers.get("x-prelude-placement")
            assert found == ("p0>d0" if asks and debug_header else None)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_says_where_the_adapter_was(stream: bool) -> None:
    async with running_cluster(debug_header=True) as cluster:
        (worker,) = cluster.prefill

        async def residency(adapter: str | None = "a0", asks: bool = True) -> str | None:
            body = {"model": MODEL, "prompt": "Hi", "stream": stream, **({"adapter": adapter} if adapter else {})}
            headers = {"x-prelude-debug": "placement"} if asks else {}
            async with cluster.http.post(f"{cluster.url}/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
                await answer.read()
                return answer.headers.get("x-prelude-residency")

        # A load from the store is on the disk, too, by its end; this is reported before the load is.
        worker.ensure_delay_s = 0.3
        asked = asyncio.create_task(residency())
        await eventually(lambda: _ready(worker.ensured), bool)
        await worker.send_delta(on_disk=[REVISION_ID])
        assert await asked == "store"
        worker.ensure_delay_s = 0.0
        assert await residency() == "host"
        assert await residency(asks=False) is None
        assert await residency(adapter=None) is None
        worker.resident.discard(REVISION_ID)
        await worker.send_delta(evicted=[REVISION_ID])
        assert await residency() == "disk"


async def _ready(value: Any) -> Any:
    return value
