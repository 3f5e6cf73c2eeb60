"""Faults of disk, memory and process: what was told stays true, what fails changes nothing, nothing begins anew."""

import asyncio
import resource
import shutil
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.held_calls import Held, failing
from support.training.trainer import (
    KillableTrainer,
    RawClient,
    data,
    make_service,
    numbers_of,
    send,
    served,
    serving,
)
from support.waiting import wait_until

from training.executor.executor import Executor
from training.executor.learner import Learner
from training.executor.operations import Done, Save, Spec
from training.runs.base import LoadedBase
from training.service import commands as service_commands
from training.service import journal as service_journal
from training.service import models as service_models
from training.service.journal import Journal, Model, Session
from training.service.messages import SaveWeights

STEPS = range(1, 7)  # commands of two steps


@pytest.fixture
def trained(base: LoadedBase, folder: Path) -> tuple[str, list[list[float]]]:
    """A model with a snapshot of its last step, and what it makes of data."""
    with serving(base, folder, snapshot_s=0) as client:
        model = client.model()
        for seq in STEPS:
            client.result(send(client, model, seq))
        return model, numbers_of(client, model, 7)


def test_a_kill_between_two_renames_of_a_snapshot_loses_nothing(base: LoadedBase, folder: Path, trained: Any):
    model, expected = trained
    [snapshot] = folder.glob("snapshots/*")
    snapshot.rename(snapshot.with_name(f".{snapshot.name}.new"))
    with serving(base, folder) as client:
        assert numbers_of(client, model, 8) == expected


def test_a_lost_snapshot_is_no_new_model(base: LoadedBase, folder: Path, trained: Any):
    shutil.rmtree(folder / "snapshots")
    with serving(base, folder) as client:
        failed = client.result(client.forward_backward(trained[0], 8, *data(1)))
        assert failed["category"] == "server"
        assert "has no state to continue" in failed["error"]
        assert "cannot be continued from command 7" in client.error(client.optim_step(trained[0], 9))


@pytest.mark.parametrize("failed", ["run", "step"])
def test_what_was_done_and_fails_after_a_restart_is_not_left_out(
    base: LoadedBase, folder: Path, monkeypatch: pytest.MonkeyPatch, failed: str
):
    with serving(base, folder) as client:
        model = client.model()
        for seq in STEPS:
            client.result(send(client, model, seq))
        expected = numbers_of(client, model, 7)
    with monkeypatch.context() as patched, served(make_service(base, folder, snapshot_s=0).app()) as url:
        failing(patched, Learner, failed, torch.OutOfMemoryError())
        client = RawClient(url)
        assert "cannot be continued from command" in client.error(client.forward_backward(model, 8, *data(1)))
        assert client.result(send(client, model, 3))["metrics"]["grad_norm"] > 0  # as it was told
    with serving(base, folder) as client:  # with enough memory
        assert numbers_of(client, model, 9) == expected


def test_a_pass_that_fails_before_it_computes_fails_its_step(
    base: LoadedBase, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    with serving(base, folder) as client:
        model = client.model()
        client.result(client.forward_backward(model, 1, *data(1)))
        failing(monkeypatch, Executor, "_model", torch.OutOfMemoryError())
        assert "memory is full" in client.error(client.forward_backward(model, 2, *data(2)))
        assert "a pass before this step failed (command 2)" in client.error(client.optim_step(model, 3))


def test_a_load_that_cannot_be_kept_changes_nothing(base: LoadedBase, folder: Path, monkeypatch: pytest.MonkeyPatch):
    with serving(base, folder) as client:
        model = client.model()
        path = client.result(client.post("save_weights", model_id=model, seq_id=1, path="first"))["path"]
        client.result(client.forward_backward(model, 2, *data(1)))
        client.result(client.optim_step(model, 3))
        expected = numbers_of(client, model, 4)
        failing(monkeypatch, Learner, "save", OSError(28, "No space left on device"))
        loaded = client.post("load_weights", model_id=model, seq_id=5, path=path, optimizer=True)
        assert "nothing was saved: No space left" in client.error(loaded)
        assert numbers_of(client, model, 6) == expected
    with serving(base, folder) as client:
        assert numbers_of(client, model, 7) == expected


def test_of_a_model_that_could_not_be_created_nothing_is_computed(base: LoadedBase, folder: Path):
    with serving(base, folder) as client:
        path = client.result(client.post("save_weights", model_id=client.model(), seq_id=1, path="first"))["path"]
        [state] = folder.glob("checkpoints/*/first/training/state.safetensors")
        state.write_bytes(state.read_bytes()[:-1])
        created = client.post("load_weights", session_id=client.session(), model_seq_id=0, path=path, optimizer=True)
        assert "has the digest" in client.error(created)
        model = created.json()["request_id"].partition("#")[0]
        assert "cannot be continued from command 0" in client.error(client.forward_backward(model, 1, *data(1)))
    with serving(base, folder) as client:
        assert "cannot be continued from command 0" in client.error(client.forward_backward(model, 2, *data(1)))


def test_a_step_that_would_make_parameters_infinite_changes_nothing(base: LoadedBase, folder: Path):
    """With eps=0 a parameter whose gradient is 0, as of half of a new LoRA adapter, would be 0/0."""
    with serving(base, folder) as client:
        model = client.model()
        expected = numbers_of(client, model, 1)
        client.result(client.forward_backward(model, 2, *data(1)))
        assert "raise eps" in client.error(client.optim_step(model, 3, eps=0.0))
        assert numbers_of(client, model, 4) == expected
        client.result(client.forward_backward(model, 5, *data(1)))
        norm = client.result(client.optim_step(model, 6))
        other = client.model(1)
        client.result(client.forward_backward(other, 1, *data(1)))
        assert client.result(client.optim_step(other, 2)) == norm
        assert numbers_of(client, other, 3) == numbers_of(client, model, 7)  # moments, too


def test_a_name_is_one_checkpoints_and_the_limit_holds_also_for_those_to_come(
    base: LoadedBase, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    with serving(base, folder) as client:
        model = client.model()

        def save(seq: int, name: str, **fields: Any) -> Any:
            return client.post("save_weights", model_id=model, seq_id=seq, path=name, **fields)

        early = [save(3, "a"), save(2, "a"), save(4, "a", overwrite=True)]  # the first one is missing
        client.error(client.forward_backward(model, 1, loss_fn="none"))
        assert client.result(early[0])["path"].endswith("/a")
        assert "exists; choose another name" in client.error(early[1])
        assert client.result(early[2])["path"].endswith("/a")
        monkeypatch.setattr(service_models, "_CHECKPOINTS", 2)
        early = [save(7, "b"), save(6, "c"), save(8, "a", overwrite=True)]
        client.error(client.forward_backward(model, 5, loss_fn="none"))
        client.result(early[0])
        assert "there are 2 checkpoints, the limit" in client.error(early[1])
        client.result(early[2])


def test_a_removed_model_is_not_written_again(tmp_path: Path):
    """By the executor, which had begun to note a snapshot of it."""
    journal = Journal(tmp_path / "commands.db")
    model = Model("s:train:0", "acme", "s", Spec(4, 1))
    journal.add_model(model, model.spec)
    journal.remove_model(model.id)
    journal.forget(model)
    assert journal.all(Model) == []
    journal.close()


def test_an_id_is_given_again_once_nothing_of_the_stopped_model_is_left(
    base: LoadedBase, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The next model of the id would begin with the snapshot of the one before, and compute none of its commands."""
    service = make_service(base, folder, snapshot_s=0)
    with served(service.app()) as url:
        client = RawClient(url)
        session = client.session()
        model = client.model(0, session)
        new = numbers_of(client, model, 1)
        client.result(client.forward_backward(model, 2, *data(1)))
        client.result(client.optim_step(model, 3))
        assert numbers_of(client, model, 4) != new
        held = Held(monkeypatch, Learner, "run")
        client.forward_backward(model, 5, *data(1))
        held.begun.wait()
        loop = service._commands._loop
        asyncio.run_coroutine_threadsafe(service._models.stop(model), loop).result()

        def create() -> httpx.Response:
            lora = {"rank": 4, "seed": 1}
            return client.post("create_model", session_id=session, model_seq_id=0, base_model="demo", lora_config=lora)

        refused = create()
        assert (refused.status_code, "is being removed; try again" in refused.text) == (429, True)
        held.go_on.set()
        wait_until(lambda: model not in service._commands.executor.tenants)
        assert client.result(create())["model_id"] == model
        assert numbers_of(client, model, 1) == new


def test_who_reads_the_log_waits_for_no_write(tmp_path: Path):
    """The event loop of all clients reads it, and a disk may take long."""
    journal, begun, go_on = Journal(tmp_path / "commands.db"), threading.Event(), threading.Event()

    def hold(_statement: str) -> None:
        begun.set()
        assert go_on.wait(60)

    journal.put(Session("s", "acme"))
    journal._database.set_trace_callback(hold)
    writing = threading.Thread(target=journal.put, args=(Session("t", "acme"),))
    writing.start()
    begun.wait()
    reading = threading.Thread(target=journal.get, args=(Session, "s"))
    reading.start()
    reading.join(120)
    assert (reading.is_alive(), writing.is_alive(), journal.get(Session, "t")) == (False, True, None)
    go_on.set()
    writing.join()
    assert journal.get(Session, "t") == Session("t", "acme")
    journal.close()


def test_records_of_one_tenant_are_read_without_those_of_others(tmp_path: Path):
    """Clients ask for them at will, and others may have tens of thousands: the event loop would read them all."""
    journal, steps = Journal(tmp_path / "commands.db"), 0

    def step() -> None:
        nonlocal steps
        steps += 1

    for number in range(200):
        journal.put(Session(f"{number}", "acme" if number else "beta"))
    journal._reader.set_progress_handler(step, 1)
    assert (journal.count(Session, "beta"), journal.all(Session, "beta")) == (1, [Session("0", "beta")])
    assert steps < 100
    read, parts = journal._read, []
    journal._read = lambda *asked: parts.append(read(*asked)) or parts[-1]  # type: ignore[method-assign]
    assert [each.id for each in journal.all(Session)] == [f"{number}" for number in range(200)]
    assert sorted(map(len, parts)) == [1, 2, 199]
    journal.close()


@pytest.mark.parametrize(("owner", "name"), [(shutil, "rmtree"), (Journal, "all")], ids=["deleting", "listing"])
def test_no_client_waits_for(owner: Any, name: str, base: LoadedBase, folder: Path, monkeypatch: pytest.MonkeyPatch):
    service = make_service(base, folder)
    with served(service.app()) as url:
        client = RawClient(url)
        stopped, model = client.model(), client.model(1)
        held = Held(monkeypatch, owner, name)
        work: Any = service._models.stop(stopped) if owner is shutil else service._models.described()
        asyncio.run_coroutine_threadsafe(work, service._commands._loop)
        assert held.begun.wait(60)
        assert client.forward_backward(model, 1, *data(1)).status_code == 200
        held.go_on.set()


def test_what_is_deleted_is_not_written_over(tmp_path: Path):
    """With zeros, as some builds of SQLite do: it takes seconds, in which no other command can be logged."""
    journal = Journal(tmp_path / "commands.db")
    for model in ("s:train:0", "s:train:1"):
        journal.add_model(Model(model, "acme", "s", Spec(4, 1), snapshot=1), Spec(4, 1))
        journal.add(model, 1, bytes(4 * 1024**2), None, True)
        for seq in (0, 1):
            journal.finish(model, seq, Done())
    journal.close()
    journal = Journal(tmp_path / "commands.db")
    [first, second] = journal.all(Model)
    journal.remove_model(first.id)
    journal.forget(second)
    assert (journal.seqs(first.id), journal.num_bytes(second.id)) == ([], 0)
    assert (tmp_path / "commands.db-wal").stat().st_size < 1024**2
    journal.close()


def test_what_a_kill_left_behind_is_removed(base: LoadedBase, folder: Path, trained: Any):
    (folder / "snapshots/gone").mkdir(parents=True)
    with serving(base, folder) as client:
        assert numbers_of(client, *trained[:1], 8) == trained[1]
    assert [path.parent.name for path in folder.glob("s*/*")] == ["snapshots"]


@pytest.mark.slow
def test_a_full_disk_delays_and_loses_nothing(trainer: KillableTrainer):
    """The log may not grow any more while commands are computed, and then it may again."""
    client = RawClient(trainer.url, headers=trainer.headers)
    models = [client.model(number, seed=1) for number in range(2)]
    expected = [client.retrieve(send(client, models[0], seq)).content for seq in range(1, 31)]
    futures = {seq: send(client, models[1], seq) for seq in range(30, 0, -1)}  # the first comes last
    limits = resource.prlimit(trainer.process.pid, resource.RLIMIT_FSIZE)
    full = (trainer.folder / "commands.db-wal").stat().st_size
    resource.prlimit(trainer.process.pid, resource.RLIMIT_FSIZE, (full, limits[1]))
    while b"the log cannot be written" not in trainer.log.read_bytes():
        time.sleep(0.05)
    assert client.optim_step(models[1], 31).status_code == 500  # so the SDK tries again
    health = client.http.get("/healthz")
    assert (health.status_code, health.json()["status"]) == (503, "the log cannot be written: disk I/O error")
    resource.prlimit(trainer.process.pid, resource.RLIMIT_FSIZE, limits)
    assert client.http.get("/healthz").status_code == 200
    assert [client.retrieve(futures[seq]).content for seq in range(1, 31)] == expected


def test_an_outcome_waits_for_a_full_disk(base: LoadedBase, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service_commands, "_DISK_S", 0.01)
    with serving(base, folder, snapshot_s=0) as client:
        model = client.model()
        failing(monkeypatch, Journal, "finish", sqlite3.OperationalError("database or disk is full"), times=3)
        failing(monkeypatch, Journal, "forget", sqlite3.OperationalError("database or disk is full"))
        for seq in STEPS:
            client.result(send(client, model, seq))
        assert client.http.get("/healthz").status_code == 200


def test_requests_at_the_same_time(base: LoadedBase, folder: Path):
    """Retries are one command; of checkpoints with one name, one is made."""
    service = make_service(base, folder)
    with served(service.app()) as url:
        client = RawClient(url)
        model = client.model()
        live, journal = service._commands.models[model], service._commands.journal

        async def accept(seqs: list[int]) -> list[str]:
            def save() -> Save:
                return service._models.save(live, SaveWeights(model_id=model, seq_id=0, path="a"))

            return await asyncio.gather(*(service._commands.accept(live, seq, save) for seq in seqs))

        def at_once(*seqs: int) -> list[str]:
            return asyncio.run_coroutine_threadsafe(accept(list(seqs)), service._commands._loop).result()

        assert at_once(9, 9, 9, 9) == [f"{model}#9"] * 4
        at_once(2, 3, 4, 5)
        assert [seq for seq, _ in journal.operations(live.model)] == [0, 9]


def test_outcomes_are_kept_for_clients_that_waited_for_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(service_journal.time, "time", lambda: now)
    spec = Spec(4, 1)
    model = Model("s:train:0", "acme", "s", spec, snapshot=1)
    journal = Journal(tmp_path / "commands.db")
    journal.add_model(model, spec)
    for seq in (0, 1):
        journal.finish(model.id, seq, Done())
    journal.close()
    now = 10_000.0
    journal = Journal(tmp_path / "commands.db")
    for after_s, is_kept in ((1.0, True), (service_journal._KEPT_S + 1, False)):
        now = 10_000.0 + after_s
        journal.forget(model)
        assert (journal.seqs(model.id) == [0]) == is_kept
    journal.close()
