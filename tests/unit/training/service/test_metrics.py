"""What the trainer tells Prometheus and probes."""

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.ports import two_ports
from support.training.trainer import RawClient, data, make_service, served, serving
from support.waiting import wait_until

from observability.registry import metrics
from training.executor.turns import Share
from training.runs.base import LoadedBase
from training.service.app import _LEAST_FREE_BYTES, Service
from training.service.journal import Pushed

pytestmark = pytest.mark.slow


class Status:
    """The page of one service."""

    def __init__(self, base: LoadedBase, folder: Path, **options: Any) -> None:
        self._url = f"http://127.0.0.1:{(port := two_ports())}"
        self.service: Service = make_service(base, folder, status_at=("127.0.0.1", port), **options)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self._url}{path}")

    def samples(self) -> dict[str, float]:
        """By name and the values of labels."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        return {
            " ".join((sample.name.removeprefix("prelude_trainer_"), *sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }


def test_commands_are_counted_by_what_came_of_them(base: LoadedBase, folder: Path):
    status = Status(base, folder, share_of=lambda tenant: Share(tokens_per_min=1 if tenant == "paused" else None))
    with served(status.service.app()) as url:
        client = RawClient(url)
        session = client.session()
        model, idle = client.model(0, session), client.model(1, session)
        status.service._journal.put(Pushed("a:sample:0", "acme", model, session, "bot", "sampler"))
        client.result(client.forward_backward(model, 1, *data(1, 2)))
        client.result(client.forward_backward(model, 2, *data(1), forward_only=True))
        client.result(client.optim_step(model, 3))
        client.error(client.optim_step(model, 4, beta1=2.0))
        client.result(client.post("save_weights", model_id=model, seq_id=5, path="one"))
        client.error(client.post("save_weights_for_sampler", model_id=model, seq_id=6, path="none"))  # no router
        client.optim_step(idle, 2)  # 1 is missing
        paused = RawClient(url, "tml-paused")
        waiting = paused.model()
        for seq in (1, 2):
            paused.forward_backward(waiting, seq, *data(1))
        wait_until(lambda: [status.samples()[f"models {state}"] for state in ("paused", "idle")] == [1, 1])
        found = status.samples()
    counted = {name.partition(" ")[2]: found[name] for name in found if name.startswith("commands_total ")}
    assert counted == {
        "create done": 3, "forward_backward done": 2, "forward done": 1, "step done": 1, "unknown refused": 1,
        "save done": 1, "export failed": 1,
    }  # fmt: skip
    assert found["tokens_total"] == 4 * 11
    assert (found["queue_seconds_count"], found["command_seconds_count step"], found["replays_total"]) == (6, 1, 0)
    assert [found[f"models {state}"] for state in ("ready", "idle", "missing", "broken")] == [0, 1, 1, 0]
    assert found["commands_kept"] == 7 + 2 + 3
    assert found["sampler_aliases"] == 1
    assert found["log_bytes"] >= (folder / "commands.db").stat().st_size
    assert found["model_bytes"] == sum(
        queue.learner.num_bytes for queue in status.service._commands.executor._queues.values() if queue.learner
    )
    assert {name.split()[0].removesuffix("_total") for name in found} <= {
        each.removeprefix("prelude_trainer_") + suffix
        for each in metrics()
        for suffix in ("", "_bucket", "_sum", "_count", "_created")
    }


def test_a_start_counts_what_it_computes_again(base: LoadedBase, folder: Path):
    with serving(base, folder) as client:
        model = client.model()
        client.result(client.forward_backward(model, 1, *data(1)))
        client.result(client.optim_step(model, 2))
    status = Status(base, folder)
    with served(status.service.app()):
        wait_until(lambda: status.samples()["models idle"] == 1)
        found = status.samples()
    assert (found["replays_total"], found.get("tokens_total"), found["queue_seconds_count"]) == (3, 0, 0)


def test_health_is_the_executors_and_the_disk_is_told_to_clients(
    base: LoadedBase, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    status = Status(base, folder)
    with served(status.service.app()) as url:
        health = f"{url}/api/v1/healthz"
        assert [status.get(path).status_code for path in ("/health", "/ready", "/other")] == [200, 200, 404]
        assert httpx.get(health).json() == {"status": "ok"}
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, _LEAST_FREE_BYTES - 1))
        assert httpx.get(health).status_code == 503
        assert "make room" in httpx.get(health).json()["status"]
        assert status.samples()["free_disk_bytes"] == _LEAST_FREE_BYTES - 1
        assert status.get("/health").status_code == 200  # another process would have no more room
        status.service._commands.executor.stop()
        assert status.get("/health").status_code == 503
        assert status.get("/ready").status_code == 503
