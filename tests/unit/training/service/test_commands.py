"""Commands over HTTP: order, retries, holes, failures, tenants, hostile bodies."""

import asyncio
import re
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from support.training.trainer import (
    RawClient,
    data,
    datum,
    logprobs_of,
    make_service,
    numbers_of,
    send,
    sequence,
    served,
    weights,
)
from support.waiting import wait_until

from training.runs.base import LoadedBase
from training.service import app as service_app
from training.service import commands as service_commands
from training.service import models as service_models
from training.service.wire import MAX_BODY_BYTES


@pytest.fixture
def plain(client: RawClient) -> tuple[list[float], list[list[float]]]:
    """Two steps in order: gradient norms, and what the model makes of data then."""
    model = client.model()
    results = [client.result(send(client, model, seq)) for seq in range(1, 7)]
    return [results[place]["metrics"]["grad_norm"] for place in (2, 5)], numbers_of(client, model, 7)


def test_commands_come_in_any_order_and_count_once(client: RawClient, plain: Any):
    """Of three models that do not change each other: each has the numbers that it has alone."""
    session = client.session()
    models = [client.model(number, session) for number in range(3)]
    for seq in (6, 3, 3, 5, 2, 4, 6, 1, 4):
        futures = [send(client, model, seq) for model in models]
        assert [each.json()["request_id"] for each in futures] == [f"{model}#{seq}" for model in models]
        if seq == 2:  # while 5 waits, it comes again with a body of its own
            other = client.forward_backward(models[0], 5, *data(9))
            assert other.json()["request_id"] == f"{models[0]}#5"
    norms = [[client.result(send(client, model, seq))["metrics"]["grad_norm"] for seq in (3, 6)] for model in models]
    assert norms == [plain[0]] * 3
    assert [numbers_of(client, model, 7) for model in models] == [plain[1]] * 3
    again = [client.retrieve(send(client, models[0], 1)).content for _ in range(2)]
    assert again[0] == again[1]


def test_a_refused_command_is_a_failed_future_and_leaves_no_hole(client: RawClient):
    model = client.model()
    assert "loss_fn is 'dro'" in client.error(client.forward_backward(model, 1, *data(1), loss_fn="dro"))
    assert "a pass before this step failed (command 1)" in client.error(client.optim_step(model, 2))
    client.result(client.forward_backward(model, 3, *data(1)))
    assert client.result(client.optim_step(model, 4))["metrics"]["grad_norm"] > 0
    for seq, (fields, why) in enumerate(
        (
            ({"beta1": 1.0}, "beta1 is 1.0"),
            ({"learning_rate": -1}, "learning_rate is -1.0"),
            ({"momentum": 0.9}, "unknown field `momentum`"),
            ({"eps": "small"}, "float"),
        ),
        5,
    ):
        assert why in client.error(client.optim_step(model, seq, **fields))
    assert client.result(client.optim_step(model, 9))["metrics"] == {"grad_norm": 0.0}


def test_a_failed_forward_pass_costs_no_step(client: RawClient):
    model = client.model()
    client.result(client.forward_backward(model, 1, *data(1)))
    client.error(client.forward_backward(model, 2, forward_only=True))
    assert client.result(client.optim_step(model, 3))["metrics"]["grad_norm"] > 0


def test_a_gradient_that_is_not_finite_changes_nothing(client: RawClient):
    model = client.model()
    before = numbers_of(client, model, 1)
    huge = datum(sequence(1), weights=[3e38 * weight for weight in weights()], answer=weights())
    assert "the loss is inf" in client.error(client.forward_backward(model, 2, huge))
    client.error(client.optim_step(model, 3))
    client.result(client.forward_backward(model, 4, *data(1)))
    after = numbers_of(client, model, 5)
    assert after == before


def test_what_is_missing_for_long_fails_and_the_rest_goes_on(base: LoadedBase, folder: Path):
    service = make_service(base, folder)
    with served(service.app()) as url:
        client = RawClient(url)
        model = client.model()
        late = client.optim_step(model, 3)

        def look(now_s: float) -> None:
            asyncio.run_coroutine_threadsafe(service._commands.fill_gaps(now_s), service._commands._loop).result()

        look(0.0)
        look(service_commands._LATE_AFTER_S - 1)
        assert service._commands.executor.gaps() == {model: (1, 3)}
        look(service_commands._LATE_AFTER_S)
        assert "a pass before this step failed (command 1)" in client.error(late)
        assert "has not arrived" in client.error(client.forward_backward(model, 2, *data(1)))


def test_no_name_leads_elsewhere(client: RawClient):
    model = client.model()
    for number, name in enumerate(["", ".", "..", "../up", "a/b", "a\\b", ".hidden", "a" * 64, "a\n", "ä", "%2e%2e"]):
        for seq, path in ((2 * number + 1, "save_weights"), (2 * number + 2, "save_weights_for_sampler")):
            error = client.error(client.post(path, model_id=model, seq_id=seq, path=name))
            assert "is none: 1 to 63 letters" in error, name
        path = f"tinker://{model}/weights/{name}"
        fields = {"session_id": model.partition(":")[0], "model_seq_id": 1, "path": path}
        assert client.post("load_weights", optimizer=False, **fields).status_code == 404, name


def test_hostile_bodies_are_refused(client: RawClient, url: str):
    post = client.http.post
    model = client.model()
    assert post("/create_session", content=bytes(MAX_BODY_BYTES + 1)).status_code == 413
    compressed = {"Content-Encoding": "zstd"}
    assert post("/create_session", content=zstandard.compress(bytes(2**20 + 1)), headers=compressed).status_code == 413
    bomb = zstandard.compress(bytes(MAX_BODY_BYTES + 1))
    assert post("/forward_backward", content=bomb, headers=compressed).status_code == 413
    assert post("/forward_backward", content=b"no", headers=compressed).status_code == 400
    assert post("/forward_backward", content=b"{}", headers={"Content-Encoding": "br"}).status_code == 400
    for path in ("create_session", "create_model", "optim_step", "asample", "retrieve_future", "load_weights"):
        for body in (b"", b"{", b"[]", b"null", b'{"model_id": {}}', b"\xff"):
            assert post(f"/{path}", content=body).status_code == 400, (path, body)
    for request_id in ("", "#", "x", f"{model}#", f"{model}#x", f"{model}#{'9' * 30}", f"{model}#-1", "#1"):
        assert client.post("retrieve_future", request_id=request_id).status_code == 404, request_id
    assert client.post("retrieve_future", request_id=f"{model}#77").status_code == 410
    for seq in (-1, 0, 2**31, 10**6):
        assert client.post("optim_step", model_id=model, seq_id=seq, adam_params={}).status_code in (200, 400)
    assert client.optim_step(model, 5000).status_code == 400
    assert httpx.post(f"{url}/api/v1/create_session", json={"tags": [], "sdk_version": "1"}).status_code == 401
    assert client.http.get("/healthz").json() == {"status": "ok"}


DIREFT = {"user_metadata": {"prelude.kind": "direft"}}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"base_model": "other"}, "base_model is 'other'; 'demo' is served here"),
        ({"lora_config": {"rank": 0}}, "rank is 0; it is from 1 to 64"),
        ({"lora_config": {"rank": 65}}, "rank is 65"),
        ({"lora_config": {"rank": 4, "alpha": 1}}, "unknown field `alpha`"),
        ({"lora_config": {"rank": 4, "train_attn": False, "train_mlp": False}}, "nothing is trained"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config"),
        ({"user_metadata": {"prelude.rank": "4"}}, "behind 'prelude.', adapter, kind, positions mean"),
        ({"user_metadata": {"prelude.kind": "reft"}}, "prelude.kind is 'reft'; it is lora or direft or loreft"),
        ({**DIREFT, "lora_config": {"rank": 32}}, "the rank is 32; it must be below the model's hidden size, 32"),
        (
            {**DIREFT, "lora_config": {"rank": 4, "train_mlp": False}},
            "LoRA changes; prelude.kind is 'direft'",
        ),
        ({"user_metadata": {"prelude.positions": "some"}}, "prelude.positions is 'some'"),
        ({"user_metadata": {"prelude.adapter": "other/bot"}}, "of another tenant"),
        ({"user_metadata": {"prelude.adapter": "../bot"}}, "is not an adapter name"),
        ({"user_metadata": {"k": "v" * 4096}}, "user_metadata has 4097 characters; 4096 are kept"),
        ({"model_seq_id": -1}, "model_seq_id is -1"),
    ],
)
def test_a_model_that_cannot_be_is_refused(client: RawClient, fields: dict[str, Any], why: str):
    good = {"model_seq_id": 0, "base_model": "demo", "lora_config": {"rank": 4}}
    answer = client.post("create_model", session_id=client.session(), **{**good, **fields})
    assert answer.status_code == 400
    assert why in answer.json()["error"]


def test_sessions_end_and_their_models_are_forgotten(base: LoadedBase, folder: Path):
    service = make_service(base, folder, snapshot_s=0)
    with served(service.app()) as url:
        client = RawClient(url)
        session, silent = client.session(), client.session()
        model, other = client.model(0, session), client.model(0, silent)
        client.result(client.forward_backward(model, 1, *data(1)))
        client.result(client.optim_step(model, 2))
        saved = client.result(client.post("save_weights", model_id=model, seq_id=3, path="kept"))["path"]
        assert client.post("session_heartbeat", session_id=session).status_code == 200

        def sweep(after_s: float) -> None:
            seen = service._models._seen_s.values()
            sweeping = service._models.sweep(max(seen) + after_s)
            asyncio.run_coroutine_threadsafe(sweeping, service._commands._loop).result()

        assert client.post(f"sessions/{session}/finish", reason={"type": "success"}, detail=None).status_code == 200
        assert client.post("session_heartbeat", session_id=session).status_code == 410
        sweep(1.0)
        assert client.post("get_info", model_id=model).status_code == 404
        assert client.post("get_info", model_id=other).status_code == 200
        sweep(service_models._SILENT_S + 1)  # the sum is rounded
        assert client.post("get_info", model_id=other).status_code == 404
        again = client.post("load_weights", session_id=client.session(), model_seq_id=0, path=saved, optimizer=True)
        client.result(again)
        deleted = client.http.delete(f"/training_runs/{model}/checkpoints/weights/kept")
        assert deleted.status_code == 204
        assert client.post("weights_info", tinker_path=saved).status_code == 404
    assert [path.name for path in folder.glob("checkpoints/*/*")] == []
    assert [path.name for path in (folder / "snapshots").iterdir()] == [
        re.sub("[:#]", "-", again.json()["request_id"][:-2])
    ]


def test_numbers_are_bounded(base: LoadedBase, folder: Path, monkeypatch: pytest.MonkeyPatch):
    for name, limit in (("_SESSIONS", 2), ("_SAMPLERS", 1), ("_MODELS", 1), ("_CHECKPOINTS", 1)):
        monkeypatch.setattr(service_models, name, limit)
    with served(make_service(base, folder).app()) as url:
        client, other = RawClient(url), RawClient(url, "tml-other")
        model = client.model()
        refused = client.post(
            "create_model", session_id=client.session(), model_seq_id=0, base_model="demo", lora_config={"rank": 4}
        )
        assert "there are 1 models of acme, the limit" in refused.json()["error"]
        assert client.post("create_session", tags=[], sdk_version="0.38.0").status_code == 429  # the third
        other.model()
        sampling = {"session_id": model.partition(":")[0], "base_model": "demo"}
        made = [client.post("create_sampling_session", sampling_session_seq_id=n, **sampling) for n in (0, 1)]
        assert [answer.status_code for answer in made] == [200, 429]
        client.result(client.post("save_weights", model_id=model, seq_id=1, path="one"))
        assert "the limit; delete some" in client.error(
            client.post("save_weights", model_id=model, seq_id=2, path="two")
        )
        monkeypatch.setattr(service_commands, "_MAX_LOGGED_BYTES", 1)
        # Until the executor is past the command before, the log counts as full for others.
        ask = partial(client.forward_backward, model, 3, *data(1))
        wait_until(lambda: ask().status_code != 429)
        assert "passes without a step" in client.error(ask())
        wait_until(lambda: client.optim_step(model, 4).status_code != 429)
        client.error(client.optim_step(model, 4))
        monkeypatch.setattr(service_commands, "_MAX_LOGGED_BYTES", 2**29)
        waiting = client.optim_step(model, 6)
        monkeypatch.setattr(service_commands, "_MAX_LOGGED_BYTES", 1)
        assert client.optim_step(model, 7).status_code == 429
        client.error(client.forward_backward(model, 5, *data(1)))  # which is missed
        client.error(waiting)
        monkeypatch.setattr(service_app, "_MAX_POLLS", 0)
        assert client.post("retrieve_future", request_id=f"{model}#1").status_code == 429


def test_a_long_poll_ends_without_a_result(client: RawClient, monkeypatch: pytest.MonkeyPatch):
    model = client.model()
    waiting = client.optim_step(model, 2)  # 1 is missing
    monkeypatch.setattr(service_app, "_POLL_S", 0.01)
    answer = client.post("retrieve_future", request_id=waiting.json()["request_id"]).json()
    assert answer == {"type": "try_again", "request_id": f"{model}#2", "queue_state": "active"}
    client.error(client.forward_backward(model, 1, loss_fn="none"))
    assert "a pass before" in client.error(waiting)


def test_an_output_has_what_the_sdk_reads(client: RawClient):
    model = client.model()
    output = client.result(client.forward_backward(model, 1, *data(1), datum(sequence(2, 6), weights=weights(6))))
    assert [len(each) for each in logprobs_of(output)] == [11, 5]
    first = logprobs_of(output)[0]
    assert (first[:5] == 0).all()
    assert (first[5:] < 0).all()
    total = -sum(np.asarray(each, np.float64).sum() for each in logprobs_of(output))
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-6)
