"""Memory-only pushes to the stand-in cluster, and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.router_stand_ins import ClusterStandIn, eventually
from support.routers.management_calls import ask, form, lora

Answer = tuple[int, Any]


async def push(cluster: ClusterStandIn, folder: Path, seed: int, name: str = "bot", **fields: str) -> Answer:
    """A push of what is to be in memory only."""
    data = form(lora(folder, seed), memory_only="true", **fields)
    return await ask(cluster, "POST", f"/v1/adapters/{name}/push", data=data)


async def gone(cluster: ClusterStandIn, adapter: str, status: int = 410) -> dict[str, Any]:
    """The message of a request that is refused without `retry-after`."""
    found, answer, headers = await cluster.post(prompt="Hi", adapter=adapter)
    assert found == status, answer
    assert ("retry-after" in headers) is (status == 503)
    return answer["error"]


async def until(is_so: Callable[[], bool]) -> None:
    await eventually(lambda: asyncio.sleep(0, is_so()), bool)


def in_store(cluster: ClusterStandIn) -> set[str]:
    """The revisions in the store, whole or on their way."""
    return {path.name for path in (cluster.folder / "store").rglob("*") if path.is_file()}


def digits(revision_id: str) -> str:
    return revision_id.removeprefix("sha256:")


def id_of_pushed(answer: Answer) -> str:
    assert answer[0] == 200, answer
    return answer[1]["revision"]
