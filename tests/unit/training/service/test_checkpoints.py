"""Checkpoints are listed, expire, and say of their runs what clients said."""

import asyncio
import os
import shutil
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tinker
from msgspec.structs import replace
from support.training.trainer import RawClient, make_service, served
from support.waiting import wait_until

from training.executor.learner import Learner
from training.executor.operations import Spec
from training.runs.base import LoadedBase
from training.service.checkpoints import Checkpoints
from training.service.journal import Checkpoint, Journal, Record

RENDERER = {"renderer_name": "qwen3"}
WEEK_S = 7 * 24 * 3600


@pytest.mark.slow
def test_what_the_cookbook_asks_of_checkpoints(base: LoadedBase, folder: Path, monkeypatch: pytest.MonkeyPatch):
    service = make_service(base, folder)
    with served(service.app()) as url:
        client = tinker.ServiceClient(base_url=url, api_key="tml-acme")
        model = client.create_lora_training_client("demo", rank=4, seed=1, user_metadata=RENDERER).result()
        first = model.save_state("000001", ttl_seconds=WEEK_S).result().path
        final = model.save_state("final").result().path
        rest = client.create_rest_client()
        listed = rest.list_checkpoints(model.model_id).result().checkpoints
        assert [each.tinker_path for each in listed] == [first, final]
        expires: Any = listed[0].expires_at
        assert WEEK_S - 3600 < (expires - listed[0].time).total_seconds() < WEEK_S + 1
        assert listed[1].expires_at is None
        page = rest.list_user_checkpoints(limit=1).result()
        assert [each.tinker_path for each in page.checkpoints] == [final]
        assert page.cursor.total_count == 2
        assert rest.get_training_run_by_tinker_path(first).result().user_metadata == RENDERER
        rest.set_checkpoint_ttl_from_tinker_path(final, 3600).result()
        rest.set_checkpoint_ttl_from_tinker_path(first, None).result()
        listed = rest.list_checkpoints(model.model_id).result().checkpoints
        assert [each.expires_at is None for each in listed] == [True, False]

        def sweep() -> bool:
            sweeping = service._models.sweep(time.monotonic())
            asyncio.run_coroutine_threadsafe(sweeping, service._commands._loop).result()
            return not service._commands.models

        client.close("success").result()
        wait_until(sweep)
        other = RawClient(url)
        assert other.http.get("/training_runs").json()["training_runs"] == []
        ended = other.http.get(f"/training_runs/{model.model_id}").json()  # from its checkpoints
        assert (ended["user_metadata"], ended["lora_rank"], ended["base_model"]) == (RENDERER, 4, "demo")
        assert datetime.fromisoformat(ended["last_request_time"]) == listed[1].time
        later = time.time() + 3601
        monkeypatch.setattr(time, "time", lambda: later)
        sweep()
        assert [each.name for each in folder.glob("checkpoints/*/*")] == ["000001"]
        assert other.post("weights_info", tinker_path=final).status_code == 404


async def test_what_is_saved_anew_while_others_are_deleted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    journal = Journal(tmp_path / "commands.db")
    checkpoints = Checkpoints(journal, {}, "demo", tmp_path)
    first, second = (
        Checkpoint(f"tinker://m/weights/{name}", "acme", Spec(4, 1), f"checkpoints/m/{name}", expires_s=1.0)
        for name in ("first", "second")
    )
    for each in (first, second):
        journal.put(each)
        (tmp_path / each.folder).mkdir(parents=True)
    anew, rmtree = replace(second, expires_s=None), shutil.rmtree

    def delete(folder: Path, **_more: Any) -> None:
        rmtree(folder)
        journal.put(anew)

    monkeypatch.setattr(shutil, "rmtree", delete)
    await checkpoints.delete_expired()
    assert journal.all(Checkpoint) == [anew]
    assert os.listdir(tmp_path / "checkpoints/m") == ["second"]
    journal.close()


@pytest.mark.parametrize("is_done_first", [False, True])
def test_a_checkpoint_saved_while_the_one_before_is_deleted_keeps_its_files(
    base: LoadedBase, folder: Path, monkeypatch: pytest.MonkeyPatch, is_done_first: bool
):
    """The next save begins once the record of the one before is gone; it may end before or after the deletion."""
    service, saving, go_on = make_service(base, folder), threading.Event(), threading.Event()
    if is_done_first:
        go_on.set()
    save, remove = Learner.save, Journal.remove

    def held(learner: Learner, *arguments: Any) -> None:
        save(learner, *arguments)
        saving.set()
        assert go_on.wait(60)

    with served(service.app()) as url:
        client = RawClient(url)
        model = client.model()
        first = client.result(client.post("save_weights", model_id=model, seq_id=1, path="last"))["path"]
        [tensors] = folder.glob("checkpoints/*/last/training/state.safetensors")
        written = tensors.stat().st_ino
        monkeypatch.setattr(Learner, "save", held)

        def remove_and_save(journal: Journal, record: Record) -> None:
            remove(journal, record)
            again = client.post("save_weights", model_id=model, seq_id=2, path="last")
            if is_done_first:
                client.result(again)
            else:
                saving.wait()

        monkeypatch.setattr(Journal, "remove", remove_and_save)
        deleted = client.http.delete(f"/training_runs/{model}/checkpoints/weights/last")
        go_on.set()
        assert deleted.status_code == 204
        wait_until(lambda: client.post("weights_info", tinker_path=first).status_code == 200)
        assert tensors.stat().st_ino != written
        loading = {"session_id": client.session(), "model_seq_id": 0, "path": first, "optimizer": True}
        assert "model_id" in client.result(client.post("load_weights", **loading))


def test_what_is_refused(client: RawClient, url: str):
    model = client.model(user_metadata=RENDERER)
    for ttl in (3599, 10 * 365 * 24 * 3600 + 1):
        assert f"ttl_seconds is {ttl}; it is from 3600" in client.error(
            client.post("save_weights", model_id=model, seq_id=1 + (ttl > 3600), path="x", ttl_seconds=ttl)
        )
    client.result(client.post("save_weights", model_id=model, seq_id=3, path="x"))
    ttl = f"/training_runs/{model}/checkpoints/weights/x/ttl"
    assert client.http.put(ttl, json={"ttl_seconds": 1}).status_code == 400
    assert client.http.put(ttl, json={}).status_code == 400
    other = RawClient(url, "tml-stranger")
    assert other.http.put(ttl, json={"ttl_seconds": None}).status_code == 404
    assert other.http.get(f"/training_runs/{model}/checkpoints").status_code == 404
    assert other.http.get("/checkpoints").json()["checkpoints"] == []
    assert client.http.get("/checkpoints", params={"limit": "-1"}).status_code == 400
