"""What the operator sees and ends, and nobody else: `prelude trainer list | show | stop`, `prelude tenants delete`."""

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from support.commands import Prelude
from support.held_calls import Held
from support.training.trainer import SECRET, RawClient, data, make_service, send, served
from support.waiting import wait_until

from cluster.local.demo import make_demo
from training.executor.learner import Learner
from training.executor.operations import Spec
from training.runs.base import LoadedBase
from training.service import app as service_app
from training.service.app import Service
from training.service.identity import CallsOfRouter, headers_of_router
from training.service.journal import Checkpoint
from training.service.sampling import Sampling

pytestmark = pytest.mark.slow


@pytest.fixture
def service(base: LoadedBase, folder: Path) -> Service:
    return make_service(base, folder, "http://127.0.0.1:9", identities=CallsOfRouter(SECRET), snapshot_s=0.0)


@pytest.fixture
def trainer(service: Service) -> Iterator[str]:
    with served(service.app()) as url:
        yield url


@pytest.fixture
def config(trainer: str, tmp_path: Path) -> Path:
    (tmp_path / "key").write_text(SECRET)
    return calling(make_demo(tmp_path / "toy"), url=trainer, key=str(tmp_path / "key"))


def calling(config: Path, **trainer: str) -> Path:
    """The file, with a trainer at another URL or with another key."""
    sections = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**sections, "trainer": {**sections.get("trainer", {}), **trainer}}))
    return config


@pytest.fixture
def command(config: Path, capsys: pytest.CaptureFixture[str]) -> Prelude:
    return Prelude(capsys, ("trainer",), ("--config", str(config)))


def test_the_operator_sees_and_stops_models_of_all_tenants(trainer: str, command: Prelude, folder: Path):
    assert command.json("list") == {"models": []}
    acme, beta = (RawClient(trainer, headers=headers_of_router(SECRET, each, None)) for each in ("acme", "beta"))
    first, second = acme.model(), beta.model(kind="direft")
    scored = acme.result(acme.forward_backward(first, 1, *data(1, 2)))
    acme.result(acme.optim_step(first, 2))
    saved = acme.result(acme.post("save_weights", model_id=first, seq_id=3, path="one"))["path"]
    beta.optim_step(second, 2)  # 1 is missing
    wait_until(lambda: command.json("show", first)["models"][0]["state"] == "idle")  # a result is told before
    found = {
        "model": first, "tenant": "acme", "kind": "lora", "rank": 4, "positions": "prefill", "adapter": None,
        "state": "idle", "steps": 1, "tokens": 22, "checkpoint": saved,
        "loss": pytest.approx(scored.metrics["loss:sum"] / 12),  # of each answer's token
    }  # fmt: skip
    assert command.json("show", first) == {"models": [found]}
    listed = command.json("list")
    assert [each["tenant"] for each in listed["models"]] == ["acme", "beta"]
    assert listed["models"][1] == found | {
        "model": second, "tenant": "beta", "kind": "direft", "state": "missing", "steps": 0, "tokens": 0,
        "checkpoint": None, "loss": None,
    }  # fmt: skip
    assert command.json("stop", first, second) == {"stopped": [first, second]}
    assert command.json("list") == {"models": []}
    assert acme.post("get_info", model_id=first).status_code == 404
    assert [path.name for path in folder.glob("checkpoints/*/*")] == ["one"]
    loading = {"session_id": acme.session(), "model_seq_id": 0, "path": saved, "optimizer": True}
    acme.result(acme.post("load_weights", **loading))
    assert "there is no model" in command.json("stop", first, status=1)["error"]["message"]
    assert command("show", "../x")[0] == 1
    assert command("stop", "../x")[0] == 1


def test_steps_and_tokens_outlive_the_process(base: LoadedBase, folder: Path):
    """Those that a snapshot has, and those that are computed again."""
    counted, seq, model = [], 1, ""
    for snapshot_s in (0.0, 1e9, 1e9):
        service = make_service(base, folder, snapshot_s=snapshot_s)
        with served(service.app()) as url:
            client = RawClient(url)
            model = model or client.model()
            client.result(client.forward_backward(model, seq, *data(1)))
            client.result(client.optim_step(model, seq + 1))
            seq += 2
            [found] = asyncio.run(service._models.described())
            counted.append((found["steps"], found["tokens"]))
    assert counted == [(1, 11), (2, 22), (3, 33)]


def test_nobody_else_is_the_operator(trainer: str, command: Prelude, config: Path, tmp_path: Path):
    client = headers_of_router(SECRET, "acme", "prelude_key")  # what the router passes on, whatever its path is
    secret = client["authorization"]
    for headers in ({}, {"authorization": f"{secret}x"}, client):
        assert httpx.get(f"{trainer}/models", headers=headers).status_code == 401
        assert httpx.delete(f"{trainer}/models/x", headers=headers).status_code == 401
    assert httpx.get(f"{trainer}/models", headers={"authorization": secret}).status_code == 200
    (tmp_path / "other").write_text("x" * 40)
    calling(config, key=str(tmp_path / "other"))
    assert command.json("list", status=1)["error"]["code"] == "refused"
    calling(config, url="http://127.0.0.1:9")
    assert command.json("list", status=1)["error"]["code"] == "unavailable"


@pytest.fixture
def delete(config: Path, capsys: pytest.CaptureFixture[str]) -> Prelude:
    """Deletes the tenant `acme`, the only one that the catalog has."""
    prelude = Prelude(capsys, end=("--config", str(config)))
    prelude.prints("keys", "create", "ci", "--tenant", "acme")
    return deleting(prelude, "acme")


def deleting(prelude: Prelude, tenant: str) -> Prelude:
    return replace(prelude, begin=("tenants", "delete", tenant, "--yes", "--without-workers"))


def client_of(url: str, tenant: str) -> RawClient:
    return RawClient(url, headers=headers_of_router(SECRET, tenant, None))


def fill(service: Service, url: str, tenant: str) -> str:
    """Put something of every kind into the trainer's folder; returns the model."""
    client = client_of(url, tenant)
    model = client.model()
    for seq in (1, 2, 3):
        client.result(send(client, model, seq))
    client.result(client.post("save_weights", model_id=model, seq_id=4, path="one"))
    client.forward_backward(model, 6, *data(1))  # 5 is missing: it waits
    sampler = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 1, "base_model": "demo"}
    assert client.post("create_sampling_session", **sampler).status_code == 200
    service._rollouts.add(tenant, [3, 4, 5], [[6, 7]])
    return model


def tenants_in(service: Service, folder: Path) -> dict[str, set[str]]:
    """Who has something at the trainer, by where that is."""
    with sqlite3.connect(folder / "commands.db") as log, sqlite3.connect(folder / "rollouts.db") as rollouts:
        owners = dict(log.execute("SELECT id, tenant FROM records WHERE kind = 'Model'"))
        return {
            "records": {each for (each,) in log.execute("SELECT tenant FROM records")},
            "commands": {owners.get(each, "?") for (each,) in log.execute("SELECT model FROM commands")},
            "rollouts": {each for (each,) in rollouts.execute("SELECT tenant FROM rollouts")},
            **{
                kind: {owners.get(each.name.replace("-", ":"), "?") for each in folder.glob(f"{kind}/*")}
                for kind in ("checkpoints", "snapshots")
            },
        }


def test_all_goes_but_what_the_next_tenant_and_others_have(
    service: Service, trainer: str, delete: Prelude, folder: Path
):
    first, others = fill(service, trainer, "acme"), {"beta", "acme.x", "acm"}
    for tenant in ("acme#5", *others):
        fill(service, trainer, tenant)
    assert set(map(frozenset, tenants_in(service, folder).values())) == {frozenset({"acme", "acme#5", *others})}
    answer = delete.json()
    assert (answer["left"]["trainer"], answer["nothing_left"]) == ("", True)
    assert set(map(frozenset, tenants_in(service, folder).values())) == {frozenset(others)}
    assert client_of(trainer, "acme").post("get_info", model_id=first).status_code == 404
    assert service._rollouts.find("acme", np.array([3, 4, 5, 6, 7], np.int32)) == ()

    following = answer["next_cache_namespace"]
    fill(service, trainer, following)
    fill(service, trainer, "acme")  # by a router that had not heard of it
    delete.prints()
    assert set(map(frozenset, tenants_in(service, folder).values())) == {frozenset({following, *others})}


def test_what_a_tenant_has_that_a_restored_catalog_does_not_know(
    service: Service, trainer: str, delete: Prelude, config: Path, folder: Path
):
    fill(service, trainer, "acme")
    service._rollouts.add("sampler#9", [3], [[4]])
    client_of(trainer, "recorded").session()
    beta = deleting(delete, "beta")
    message = beta.json(status=1)["error"]["message"]
    assert message == "there is no tenant 'beta'; `prelude tenants list` shows them"
    calling(config, url="http://127.0.0.1:9")
    assert "the trainer may have something of it, but" in beta.json(status=1)["error"]["message"]
    calling(config, url=trainer)
    fill(service, trainer, "beta")
    answer = beta.json()
    assert (answer["left"]["trainer"], answer["nothing_left"]) == ("", True)
    deleting(delete, "sampler").json()
    deleting(delete, "recorded").json()
    assert set(map(frozenset, tenants_in(service, folder).values())) == {frozenset({"acme"})}
    following = answer["next_cache_namespace"]
    fill(service, trainer, following)
    assert beta.json()["next_cache_namespace"] == following


def test_what_is_being_computed_is_waited_for(
    trainer: str, delete: Prelude, config: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its checkpoint is in no record, as its model is gone."""
    saving = Held(monkeypatch, Learner, "save", lambda _, target, *_more: target.name == "one")
    client = client_of(trainer, "acme")
    model = client.model()
    client.post("save_weights", model_id=model, seq_id=1, path="one")
    assert saving.begun.wait(60)
    answer = delete.json("--wait", "0.01", status=1)
    assert not answer["nothing_left"]
    assert answer["left"]["trainer"].startswith("left: a command is being computed")
    saving.go_on.set()
    delete.prints()
    assert [*folder.glob("checkpoints/*"), *folder.glob("snapshots/*")] == []
    calling(config, url="http://127.0.0.1:9")
    assert delete.json(status=1)["left"]["trainer"].startswith("not known: ")


def test_strays_of_stopped_models_go_with_the_next_start(folder: Path, service: Service):
    kept, stray = (folder / "checkpoints" / name / "one" for name in ("m-train-0", "m-train-1"))
    for each in (kept, stray):
        each.mkdir(parents=True)
    service._journal.put(Checkpoint("tinker://m:train:0/weights/one", "a", Spec(4, 1), "checkpoints/m-train-0/one"))
    with served(service.app()):
        assert (kept.exists(), stray.exists()) == (True, False)


def test_what_is_being_sampled_is_waited_for(
    service: Service, trainer: str, delete: Prelude, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """It would be noted after the tenant was deleted."""
    may_answer = threading.Event()

    async def answer(self: Sampling, *_: Any) -> Any:
        await asyncio.to_thread(may_answer.wait, 60)
        return [([6, 7], None, True)], None

    monkeypatch.setattr(Sampling, "_answer", answer)
    client = client_of(trainer, "acme")
    session = client.session()
    made = client.post("create_sampling_session", session_id=session, sampling_session_seq_id=1, base_model="demo")
    sampling = {"sampling_session_id": made.json()["sampling_session_id"], "seq_id": 1, "num_samples": 1}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]}
    asked = client.post("asample", prompt=prompt, sampling_params={"max_tokens": 2, "temperature": 0.5}, **sampling)
    assert asked.status_code == 200, asked.text
    found = delete.json("--wait", "0.01", status=1)
    assert found["left"]["trainer"] == "left: 1 requests are being sampled; try again in a moment"
    may_answer.set()
    delete.prints()
    assert tenants_in(service, folder)["rollouts"] == set()


def test_the_log_gets_no_command_of_a_model_that_is_gone(
    service: Service, trainer: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its data would stay there until the next start."""
    reading = Held(monkeypatch, service_app, "pass_of")
    client = client_of(trainer, "acme")
    model = client.model()
    live = service._commands.models[model]
    with ThreadPoolExecutor() as pool:
        sent = [pool.submit(client.forward_backward, model, seq, *data(seq)) for seq in (1, 2)]
        assert reading.begun.wait(60)
        wait_until(lambda: len(live.accepting._waiters or ()) == 1)
        removing = {"authorization": f"Bearer {SECRET}"}
        removed = pool.submit(httpx.delete, f"{trainer}/tenants/acme", headers=removing, timeout=120)
        wait_until(lambda: len(live.accepting._waiters or ()) == 2)
        late = pool.submit(client.forward_backward, model, 3, *data(3))
        wait_until(lambda: len(live.accepting._waiters or ()) == 3)
        reading.go_on.set()
        assert removed.result().status_code in (204, 429)  # the first pass may be computed
        assert [each.result().status_code for each in (*sent, late)] == [200, 200, 404]
    assert tenants_in(service, folder)["commands"] == set()
