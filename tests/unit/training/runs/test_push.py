"""A checkpoint is pushed into a running cluster: a real router, workers that stand in."""

import asyncio
from pathlib import Path

import pytest
from support.router_stand_ins import BASE, LIMITS
from support.routers.management_calls import managing

from adapters.formats import read_adapter
from adapters.model.manifest import revision_id_of
from training.errors import PushFailed
from training.runs.push import PushTarget
from training.trainable.adapter import TrainableAdapter
from training.trainable.files import write_adapter
from training.trainable.spec import AdapterSpec, Kind


def checkpoint(folder: Path, kind: Kind, seed: int = 0) -> Path:
    """As a run keeps it, with a folder that is none of the adapter's."""
    folder.mkdir()
    write_adapter(TrainableAdapter.create(AdapterSpec(kind, rank=4), BASE, seed=seed), folder, "base")
    (folder / "training").mkdir()
    (folder / "training" / "state.json").write_text("{}")
    return folder


@pytest.mark.parametrize("kind", ["lora", "loreft"])
async def test_a_push_makes_a_revision_and_moves_the_alias(tmp_path: Path, kind: Kind):
    async with managing() as cluster:
        target = PushTarget(f"{cluster.url}/v1/", "acme/legal", alias="nightly")
        for number in (1, 2):
            folder = checkpoint(tmp_path / str(number), kind, seed=number)
            answer = await asyncio.to_thread(target.push, folder)
            assert (answer["number"], answer["alias"]) == (number, "nightly")
            assert answer["revision"] == revision_id_of(read_adapter(folder, BASE, LIMITS))


async def test_a_refusal_names_its_reason(tmp_path: Path):
    async with managing() as cluster:
        folder = checkpoint(tmp_path / "run", "lora")
        (folder / "adapter_config.json").write_text("{}")
        with pytest.raises(PushFailed, match=r"refuses legal: 422 adapter_malformed: .*peft_type"):
            await asyncio.to_thread(PushTarget(cluster.url, "legal").push, folder)


async def test_a_router_that_does_not_answer(tmp_path: Path):
    server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(0), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    target = PushTarget(f"http://127.0.0.1:{port}", "legal", timeout_s=0.2)
    folder = checkpoint(tmp_path / "run", "lora")
    with pytest.raises(PushFailed, match=r"within 0.2 s|cannot be pushed to"):
        await asyncio.to_thread(target.push, folder)
    server.close()
    with pytest.raises(PushFailed, match=r"http://127.0.0.1:1 cannot be pushed to"):  # nobody listens
        await asyncio.to_thread(PushTarget("http://127.0.0.1:1", "legal").push, folder)
