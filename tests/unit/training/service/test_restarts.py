"""A start goes on where the last process ended: every number is that of a run without it."""

import errno
import sqlite3
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import tinker
from support.training.trainer import (
    ADAM,
    LosesAnswers,
    RawClient,
    data,
    datum,
    make_service,
    numbers_of,
    sdk_data,
    send,
    sequence,
    served,
    serving,
    weights,
)

from training.executor.device_memory import DeviceMemory
from training.executor.executor import Executor
from training.executor.learner import Learner
from training.executor.operations import Load
from training.runs.base import LoadedBase
from training.service import journal as service_journal
from training.service.journal import Journal, Model

pytestmark = pytest.mark.slow

LAST = 12  # four steps


@pytest.fixture(scope="module")
def undisturbed(base: LoadedBase, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[list[float]]]:
    """By one process: services that share a base model in these tests must not live at the same time."""
    with serving(base, tmp_path_factory.mktemp("undisturbed")) as client:
        model = client.model()
        results = [client.retrieve(send(client, model, seq)).content for seq in range(1, LAST + 1)]
        return results, numbers_of(client, model, LAST + 1)


@pytest.mark.parametrize("snapshot_s", [0.0, 1e9])
def test_results_are_those_of_one_process(base: LoadedBase, folder: Path, undisturbed: Any, snapshot_s: float):
    """Stops between passes and steps, with and without snapshots."""
    results, model = [], ""
    for first, end in ((1, 5), (5, 8), (8, 9), (9, 13)):
        with serving(base, folder, snapshot_s=snapshot_s) as client:
            model = model or client.model()
            results += [client.retrieve(send(client, model, seq)).content for seq in range(first, end)]
    with serving(base, folder, snapshot_s=snapshot_s) as client:
        again = [client.retrieve(send(client, model, seq)).content for seq in range(1, LAST + 1)]
        assert (results, numbers_of(client, model, LAST + 1)) == undisturbed
    assert again == results
    journal = Journal(folder / "commands.db")
    [found] = journal.all(Model)
    assert found.snapshot == (LAST if snapshot_s == 0 else -1)
    kept = [seq for seq, _ in journal.operations(found)]
    journal.close()
    assert kept == list(range(LAST + 1 if snapshot_s == 0 else 0, LAST + 2))


def test_models_that_take_turns_in_memory_compute_the_same(
    base: LoadedBase, folder: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
):
    """Each goes to the disk when another's command is computed, in the midst of a step, too. The disk is full once."""
    executors: list[Executor] = []
    monkeypatch.setattr(DeviceMemory, "is_short", lambda _: executors[-1].num_bytes > 0)
    full, save, saved = iter([True]), Learner.save, []

    def save_or_fail(learner: Learner, path: Path, seq: int, *arguments: Any, **options: Any) -> None:
        if seq == 4 and next(full, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        saved.append(seq)
        save(learner, path, seq, *arguments, **options)

    monkeypatch.setattr(Learner, "save", save_or_fail)
    models: list[str] = []
    results: list[list[bytes]] = [[], [], []]
    for first, end in ((1, 6), (6, LAST + 1)):  # with a start in the midst of a step
        service = make_service(base, folder)
        executors.append(service._commands.executor)
        with served(service.app()) as url:
            client = RawClient(url)
            models = models or [client.model(number, client.session()) for number in range(3)]
            for seq in range(first, end):
                for model, found in zip(models, results, strict=True):
                    found.append(client.retrieve(send(client, model, seq)).content)
            assert sum(each.learner is not None for each in executors[-1]._queues.values()) == 1
            if end > LAST:
                numbers = [numbers_of(client, model, LAST + 1) for model in models]
    assert numbers == [undisturbed[1]] * 3
    assert results == [undisturbed[0]] * 3
    assert set(saved) >= set(range(LAST))  # also after single passes
    assert next(full, None) is None


@pytest.mark.parametrize("broken", ["pass", "model"])
def test_models_that_have_failed_take_turns_too(
    base: LoadedBase, folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str
):
    """One whose gradient is not whole stays in memory until its step has failed; one that cannot go on is let go."""
    short = [False]
    monkeypatch.setattr(DeviceMemory, "is_short", lambda _: short[0])
    service = make_service(base, folder)
    with served(service.app()) as url:
        client = RawClient(url)
        first, other = (client.model(number, client.session()) for number in range(2))
        queue = service._commands.executor._queues[first]
        client.result(send(client, first, 1))
        client.error(client.forward_backward(first, 2, datum(sequence(1), weights=[*weights()[:-1], float("inf")])))
        if broken == "model":
            queue.broken = "the model cannot be continued"
        short[0], held = True, weakref.ref(queue.learner)
        client.result(send(client, other, 1))
        assert (queue.learner is None) is (broken == "model")
        assert "cannot be continued" in (failed := client.error(client.optim_step(first, 3))) or "part of" in failed
        client.result(send(client, other, 2))
        assert (queue.learner, held()) == (None, None)
        if broken == "pass":
            assert numbers_of(client, first, 4) == numbers_of(client, client.model(3, client.session()), 1)


@pytest.mark.parametrize("still_short", [False, True])
def test_a_snapshot_within_a_step_is_of_what_failed_before_it(
    base: LoadedBase, folder: Path, monkeypatch: pytest.MonkeyPatch, still_short: bool
):
    """The process ended before the log knew of the snapshot: the failures are read again, and drop no gradient.

    While they are read, the model may move to the disk again.
    """
    numbers = []
    for is_short in (False, True):
        monkeypatch.setattr(DeviceMemory, "is_short", lambda _, found=is_short: found)
        own = folder.with_name(f"{is_short}")
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "forget", lambda *_: None)
            with serving(base, own) as client:
                model, other = (client.model(number, client.session()) for number in range(2))
                client.result(send(client, model, 1))
                client.result(client.optim_step(model, 2))
                client.error(client.forward_backward(model, 3, datum(sequence(1), weights=[float("inf")] * 11)))
                client.error(client.optim_step(model, 4))
                client.result(send(client, model, 5))
                client.result(send(client, other, 1))
        assert bool(list(own.glob("snapshots/*"))) is is_short
        monkeypatch.setattr(DeviceMemory, "is_short", lambda _: still_short)
        with serving(base, own) as client:
            client.result(client.optim_step(model, 6))
            numbers.append(numbers_of(client, model, 7))
    assert numbers[0] == numbers[1]


def test_a_snapshot_that_the_log_does_not_know_is_one(
    base: LoadedBase, folder: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
):
    """As if the process had ended between the snapshot and the log's note of it."""
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "forget", lambda *_: None)
        with serving(base, folder, snapshot_s=0) as client:
            model = client.model()
            for seq in range(1, LAST + 1):
                client.result(send(client, model, seq))
    computed = []
    monkeypatch.setattr(Learner, "run", _noting(Learner.run, computed))
    with serving(base, folder) as client:
        assert numbers_of(client, model, LAST + 1) == undisturbed[1]
    assert len(computed) == 1


def _noting(run: Any, computed: list[Any]) -> Any:
    def noted(*arguments: Any) -> Any:
        computed.append(arguments)
        return run(*arguments)

    return noted


def test_a_load_that_was_not_told_is_told_after_a_start(
    base: LoadedBase, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The log is damaged: the executor ends, and nothing is told that is not in the log."""
    with serving(base, folder) as client:
        model = client.model()
        for seq in range(1, 7):
            client.result(send(client, model, seq))
        path = client.result(client.post("save_weights", model_id=model, seq_id=7, path="six"))["path"]
        expected = numbers_of(client, model, 8)
    finish = Journal.finish

    def fail(self: Journal, model: str, seq: int, *outcome: Any) -> None:
        if isinstance(self.command(model, seq).operation, Load):
            raise sqlite3.DatabaseError("database disk image is malformed")
        finish(self, model, seq, *outcome)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "finish", fail)
        service = make_service(base, folder)
        with served(service.app()) as url:
            client = RawClient(url)
            session = client.session()
            fields = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
            loaded = client.post("load_weights", **fields)
            service._commands.executor._thread.join()
            assert client.http.get("/healthz").status_code == 503
    with serving(base, folder) as client:
        assert client.post("load_weights", **fields).json() == loaded.json()
        assert client.result(loaded) == {"path": path, "model_id": f"{session}:train:0"}
        assert numbers_of(client, f"{session}:train:0", 1) == expected


def test_a_checkpoint_may_be_replaced_after_it_was_loaded(base: LoadedBase, folder: Path):
    with serving(base, folder) as client:
        model = client.model()
        for seq in range(1, 4):
            client.result(send(client, model, seq))
        path = client.result(client.post("save_weights", model_id=model, seq_id=4, path="one"))["path"]
        fields = {"session_id": client.session(), "model_seq_id": 0, "path": path, "optimizer": True}
        loaded = client.result(client.post("load_weights", **fields))["model_id"]
        expected = numbers_of(client, loaded, 1)
        client.result(client.forward_backward(model, 5, *data(1)))
        client.result(client.optim_step(model, 6, learning_rate=1.0))
        client.result(client.post("save_weights", model_id=model, seq_id=7, path="one", overwrite=True))
        assert numbers_of(client, model, 8) != expected
    with serving(base, folder) as client:
        assert numbers_of(client, loaded, 2) == expected


def test_what_was_told_long_ago_is_forgotten_and_not_done_again(
    base: LoadedBase, folder: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(service_journal, "_KEPT_S", -1e9)
    told, forget = threading.Semaphore(0), Journal.forget

    def forget_once_told(journal: Journal, known: Model) -> None:
        assert told.acquire(timeout=120)
        forget(journal, known)

    monkeypatch.setattr(Journal, "forget", forget_once_told)
    with serving(base, folder, snapshot_s=0) as client:
        model = client.model()
        for seq in range(1, LAST + 1):
            client.result(send(client, model, seq))
            if seq % 3 == 0:  # a step, after which there is a snapshot
                told.release()
            again = send(client, model, seq)
            assert again.json()["request_id"] == f"{model}#{seq}"
        assert numbers_of(client, model, LAST + 1) == undisturbed[1]  # after the last snapshot, by the same thread
        for seq in range(1, LAST):
            assert client.retrieve(send(client, model, seq)).status_code == 410


def test_lost_answers_change_no_bit(base: LoadedBase, folder: Path):
    """The SDK sends again what was done already."""
    numbers = []
    for is_lossy in (False, True):
        app = make_service(base, folder.with_name(f"{is_lossy}")).app()
        lossy = LosesAnswers(app)
        with served(lossy if is_lossy else app) as url:
            service = tinker.ServiceClient(base_url=url, api_key="tml-lossy")
            model = service.create_lora_training_client(base_model="demo", rank=4, seed=5).result()
            run = model.forward_backward
            sent = [(run(sdk_data(step), "cross_entropy"), model.optim_step(ADAM)) for step in (1, 2, 3)]
            numbers += [(one.result().metrics, two.result().metrics) for one, two in sent]
            model.save_state("end").result()
            numbers.append(model.forward(sdk_data(9), "cross_entropy").result().metrics)
            service.close("success").result()
    assert numbers[4:] == numbers[:4]
    assert {"forward_backward", "optim_step", "retrieve_future"} <= set(lossy.lost)
