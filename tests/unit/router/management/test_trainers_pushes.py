"""POST /v1/adapters/…/push of a trainer, whose files are packed already."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.router_stand_ins import BASE, LIMITS, ClusterStandIn
from support.routers.management_calls import ask, files_of, form, lora, managing
from support.training.training_models import write_served

from adapters.errors import AdapterError
from adapters.formats import read_adapter
from adapters.model.manifest import Manifest
from adapters.model.serving import EngineDtype
from adapters.packed import PACKED_NAME, read_packed, write_packed
from adapters.packed.packing import take_packed
from router.api.training import TrainerAddress
from training.service.identity import TRAINER_HEADER
from training.trainable.packed import ServedWeights

SECRET = "the secret of router and trainer"
TRAINER = {TRAINER_HEADER: SECRET}


def packed(folder: Path, seed: int, dtype: EngineDtype = "float32") -> Path:
    """A folder with an adapter as a trainer packs it."""
    lora(folder, seed)
    made = folder / f"packed-{seed}-{dtype}"
    made.mkdir()
    ordinary = folder / f"ordinary-{seed}-{dtype}"
    write_packed(read_adapter(folder / f"lora-{seed}", BASE, LIMITS), BASE, dtype, ordinary)
    found = read_packed(ordinary)
    manifest, shapes = Manifest.from_json(found.metadata.manifest), {name: t.shape for name, t in found.tensors.items()}
    weights = ServedWeights(manifest, dtype, found.metadata.modules, None, shapes, found.data, changes_nothing=False)
    write_served(weights, made / PACKED_NAME)
    return made


def change(folder: Path, old: str, new: str) -> None:
    """In the header."""
    path = folder / PACKED_NAME
    path.write_bytes(path.read_bytes().replace(old.encode(), new.encode(), 1))


async def push(cluster: ClusterStandIn, headers: dict[str, str], files: Path | None, **fields: str) -> tuple[int, Any]:
    data = form({} if files is None else files_of(files), **fields)
    data._is_multipart = True  # also without files
    return await ask(cluster, "POST", "/v1/adapters/bot/push", data=data, headers=headers)


@pytest.mark.parametrize("memory_only", ["true", "false"])
async def test_it_is_taken_as_it_is(tmp_path: Path, memory_only: str):
    async with managing(1, 1, trainer=TrainerAddress("http://127.0.0.1:9", SECRET)) as cluster:
        for seed, is_folder in ((1, False), (2, True)):
            folder = packed(tmp_path, seed)
            expected = read_packed(folder / PACKED_NAME).metadata.revision_id
            where = {"folder": str(folder)} if is_folder else {}
            status, answer = await push(
                cluster, TRAINER, None if is_folder else folder, memory_only=memory_only, **where
            )
            assert (status, answer["revision"], answer["stored"]) == (200, expected, memory_only == "false"), answer
            if memory_only == "true":
                assert cluster.prefill[0].memory_only[expected] == (folder / PACKED_NAME).read_bytes()
            assert (await cluster.post(prompt="Hi", adapter="bot@latest"))[0] == 200


async def test_nobody_else_may(tmp_path: Path):
    folder = packed(tmp_path, 1)
    async with managing(1, 1, trainer=TrainerAddress("http://127.0.0.1:9", SECRET)) as cluster:
        for headers in ({}, {TRAINER_HEADER: ""}, {TRAINER_HEADER: SECRET[:-1]}, {TRAINER_HEADER: f"{SECRET}é"}):
            status, answer = await push(cluster, headers, folder)
            assert (status, answer["error"]["code"]) == (422, "adapter_malformed")
            status, answer = await push(cluster, headers, None, folder=str(folder))
            assert (status, answer["error"]["param"]) == (400, "folder")
        status, answer = await push(cluster, TRAINER, None, folder=str(tmp_path / "none"))
        assert (status, answer["error"]["code"]) == (422, "adapter_missing")
    async with managing(1, 1) as cluster:  # nothing is trained
        assert (await push(cluster, {TRAINER_HEADER: ""}, folder))[0] == 422
        assert (await ask(cluster, "GET", "/v1/adapters/bot"))[0] == 404


@pytest.mark.parametrize("memory_only", ["true", "false"])
async def test_a_file_that_lies_is_refused(tmp_path: Path, memory_only: str):
    """By the id of somebody's revision, or by the digest of which its own is made: others' requests would get it."""
    of_others = "sha256:" + "0" * 64
    async with managing(1, 1, trainer=TrainerAddress("http://127.0.0.1:9", SECRET)) as cluster:
        for seed, is_folder in ((1, False), (2, True)):
            folder = packed(tmp_path, seed)
            change(folder, read_packed(folder / PACKED_NAME).metadata.revision_id, of_others)
            where = {"folder": str(folder)} if is_folder else {}
            status, answer = await push(
                cluster, TRAINER, None if is_folder else folder, memory_only=memory_only, **where
            )
            assert (status, answer["error"]["code"]) == (422, "adapter_malformed")
            assert "not that of its manifest and tensors" in answer["error"]["message"]
        folder = packed(tmp_path, 3)
        with (folder / PACKED_NAME).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        status, answer = await push(cluster, TRAINER, folder, memory_only=memory_only)
        assert (status, "have the SHA-256" in answer["error"]["message"]) == (422, True)
        ordinary = tmp_path / "ordinary"
        ordinary.mkdir()
        shutil.copy(tmp_path / "ordinary-1-float32", ordinary / PACKED_NAME)  # which may have any id
        assert (await push(cluster, TRAINER, ordinary, memory_only=memory_only))[0] == 422
        assert cluster.prefill[0].memory_only == {}
        assert (await ask(cluster, "GET", "/v1/adapters/bot"))[0] == 404


def cut(folder: Path) -> None:
    with (folder / PACKED_NAME).open("r+b") as file:
        file.truncate(1000)


@pytest.mark.parametrize(
    ("dtype", "max_bytes", "change", "words"),
    [
        ("bfloat16", 2**30, lambda _: None, "packed for bfloat16, and engines serve float32"),
        ("float32", 1000, lambda _: None, "at most 1000 are accepted"),
        ("float32", 2**30, cut, "not a sound packed adapter"),
        ("float32", 2**30, shutil.rmtree, "cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, dtype: EngineDtype, max_bytes: int, change: Callable[[Path], None], words: str
):
    folder, target = packed(tmp_path, 1, dtype), tmp_path / "taken"
    change(folder)
    with pytest.raises(AdapterError, match=words):
        take_packed(folder, target, BASE, replace(LIMITS, max_bytes=max_bytes), "float32", lambda _: None)
    assert not target.exists()


def test_the_adapter_of_another_model_is_refused(tmp_path: Path):
    folder, other = packed(tmp_path, 1), replace(BASE, num_layers=BASE.num_layers + 1)
    with pytest.raises(AdapterError, match="was packed for the base model"):
        take_packed(folder, tmp_path / "taken", other, LIMITS, "float32", lambda _: None)
    assert not (tmp_path / "taken").exists()
