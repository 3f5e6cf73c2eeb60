"""`prelude trainer list | show | stop`: what the operator sees and ends, and nobody else."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.training.trainer import SECRET, RawClient, data, make_service, served
from support.waiting import wait_until

from cli.main import main
from cluster.local.demo import make_demo
from training.runs.base import LoadedBase
from training.service.identity import CallsOfRouter, headers_of_router

pytestmark = pytest.mark.slow

Command = Callable[..., tuple[int, Any]]


@pytest.fixture
def trainer(base: LoadedBase, folder: Path) -> Iterator[str]:
    with served(make_service(base, folder, identities=CallsOfRouter(SECRET)).app()) as url:
        yield url


@pytest.fixture
def command(trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `prelude trainer …`; its exit status, and what it prints as JSON."""
    config = make_demo(tmp_path / "toy")
    (tmp_path / "key").write_text(SECRET)

    def run(*words: str, url: str = trainer, **key: Path) -> tuple[int, Any]:
        section = {"url": url, "key": str(key.get("key", tmp_path / "key"))}
        config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "trainer": section}))
        capsys.readouterr()
        try:
            main(["trainer", *words, "--config", str(config), "--json"])
            status = 0
        except SystemExit as ended:
            status = int(str(ended.code))
        return status, json.loads(capsys.readouterr().out)

    return run


def test_the_operator_sees_and_stops_models_of_all_tenants(trainer: str, command: Command, folder: Path):
    assert command("list") == (0, {"models": []})
    acme, beta = (RawClient(trainer, headers=headers_of_router(SECRET, each, None)) for each in ("acme", "beta"))
    first, second = acme.model(), beta.model(kind="direft")
    scored = acme.result(acme.forward_backward(first, 1, *data(1, 2)))
    acme.result(acme.optim_step(first, 2))
    saved = acme.result(acme.post("save_weights", model_id=first, seq_id=3, path="one"))["path"]
    beta.optim_step(second, 2)  # 1 is missing
    wait_until(lambda: command("show", first)[1]["models"][0]["state"] == "idle")  # a result is told before
    found = {
        "model": first, "tenant": "acme", "kind": "lora", "rank": 4, "positions": "prefill", "adapter": None,
        "state": "idle", "steps": 1, "tokens": 22, "checkpoint": saved,
        "loss": pytest.approx(scored.metrics["loss:sum"] / 12),  # of each answer's token
    }  # fmt: skip
    assert command("show", first) == (0, {"models": [found]})
    status, listed = command("list")
    assert (status, [each["tenant"] for each in listed["models"]]) == (0, ["acme", "beta"])
    assert listed["models"][1] == found | {
        "model": second, "tenant": "beta", "kind": "direft", "state": "missing", "steps": 0, "tokens": 0,
        "checkpoint": None, "loss": None,
    }  # fmt: skip
    assert command("stop", first, second) == (0, {"stopped": [first, second]})
    assert command("list") == (0, {"models": []})
    assert acme.post("get_info", model_id=first).status_code == 404
    assert [path.name for path in folder.glob("checkpoints/*/*")] == ["one"]
    loading = {"session_id": acme.session(), "model_seq_id": 0, "path": saved, "optimizer": True}
    acme.result(acme.post("load_weights", **loading))
    status, refused = command("stop", first)
    assert (status, "there is no model" in refused["error"]["message"]) == (1, True)
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
            [found] = service._models.described()
            counted.append((found["steps"], found["tokens"]))
    assert counted == [(1, 11), (2, 22), (3, 33)]


def test_nobody_else_is_the_operator(trainer: str, command: Command, tmp_path: Path):
    client = headers_of_router(SECRET, "acme", "prelude_key")  # what the router passes on, whatever its path is
    secret = client["authorization"]
    for headers in ({}, {"authorization": f"{secret}x"}, client):
        assert httpx.get(f"{trainer}/models", headers=headers).status_code == 401
        assert httpx.delete(f"{trainer}/models/x", headers=headers).status_code == 401
    assert httpx.get(f"{trainer}/models", headers={"authorization": secret}).status_code == 200
    (tmp_path / "other").write_text("x" * 40)
    status, refused = command("list", key=tmp_path / "other")
    assert (status, refused["error"]["code"]) == (1, "refused")
    status, refused = command("list", url="http://127.0.0.1:9")
    assert (status, refused["error"]["code"]) == (1, "unavailable")
