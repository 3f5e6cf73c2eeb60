"""Management calls over HTTP, the adapter files that they upload, and pushes of what is in memory only."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from support.adapters.random_adapters import write_random_lora
from support.router_stand_ins import BASE, LIMITS, ClusterStandIn, eventually, running_cluster

from adapters.formats import read_adapter
from adapters.model.manifest import revision_id_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # files of a PEFT adapter


def managing(*counts: int, **config: Any):
    return running_cluster(*counts, management=True, **config)


def lora(folder: Path, seed: int, **options: Any) -> dict[str, bytes]:
    """The files of an adapter, by name."""
    directory = write_random_lora(folder / f"lora-{seed}", BASE, seed=seed, **options)
    return files_of(directory)


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def id_of(folder: Path, seed: int) -> str:
    return revision_id_of(read_adapter(folder / f"lora-{seed}", BASE, LIMITS))


def form(files: Mapping[str, bytes], **fields: str) -> aiohttp.FormData:
    data = aiohttp.FormData(quote_fields=False)
    for name, value in fields.items():
        data.add_field(name, value)
    for name, content in files.items():
        data.add_field("file", content, filename=name, content_type="application/octet-stream")
    return data


async def ask(cluster: ClusterStandIn, method: str, path: str, **options: Any) -> tuple[int, Any]:
    async with cluster.http.request(method, f"{cluster.url}{path}", **options) as response:
        text = await response.text()
        return response.status, json.loads(text) if response.content_type == "application/json" else text


async def upload(cluster: ClusterStandIn, files: Mapping[str, bytes], **fields: str) -> tuple[int, Any]:
    return await ask(cluster, "POST", "/v1/adapters", data=form(files, **fields))


def every_change(folder: Path) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """By kind, the method, path and options of one change of `bot` each. All succeed in this order."""
    one = "/v1/adapters/bot"
    return {
        "import": ("POST", "/v1/adapters", {"data": form(lora(folder, 1), name="bot")}),
        "push": ("POST", f"{one}/push", {"data": form(lora(folder, 2))}),
        "alias": ("PUT", f"{one}/aliases/prod", {"json": {"revision": "r1"}}),
        "unalias": ("DELETE", f"{one}/aliases/prod", {}),
        "rollback": ("POST", f"{one}/rollback", {}),
        "delete": ("DELETE", one, {}),
        **{verb: ("POST", f"{one}/{verb}", {}) for verb in ("restore", "prewarm", "evict")},
    }


async def imported(cluster: ClusterStandIn, name: str) -> None:
    """Wait until an adapter of cluster.yaml is in the catalog."""
    await eventually(lambda: ask(cluster, "GET", f"/v1/adapters/{name}"), lambda answer: answer[0] == 200, within_s=120)


async def answered_by(cluster: ClusterStandIn, adapter: str) -> str | int:
    """The revision that answers a request, or the HTTP status of its error."""
    status, _, headers = await cluster.post(prompt="Hi", adapter=adapter)
    return headers["x-prelude-revision"] if status == 200 else status


async def push(cluster: ClusterStandIn, folder: Path, seed: int, name: str = "bot", **fields: str) -> tuple[int, Any]:
    """A push of what is to be in memory only."""
    data = form(lora(folder, seed), memory_only="true", **fields)
    return await ask(cluster, "POST", f"/v1/adapters/{name}/push", data=data)


async def gone(cluster: ClusterStandIn, adapter: str, status: int = 410) -> dict[str, Any]:
    """The message of a request that is refused without `retry-after`."""
    found, answer, headers = await cluster.post(prompt="Hi", adapter=adapter)
    assert found == status, answer
    assert ("retry-after" in headers) is (status == 503)
    return answer["error"]


def in_store(cluster: ClusterStandIn) -> set[str]:
    """The revisions in the store, whole or on their way."""
    return {path.name for path in (cluster.folder / "store").rglob("*") if path.is_file()}


def id_of_pushed(answer: tuple[int, Any]) -> str:
    assert answer[0] == 200, answer
    return answer[1]["revision"]
