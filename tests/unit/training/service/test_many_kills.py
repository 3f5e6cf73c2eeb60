"""Requests that are reordered, repeated, dropped and delayed, and many kills: every bit is that of a calm run."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.training.trainer import KillableTrainer, RawClient, data, states

from cluster.local.demo import make_demo
from training.service import tinker_pb2 as pb

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

MODELS, COMMANDS, KILLS, REQUESTS = 4, 600, 50, 10_000
IN_FLIGHT = 24  # commands of a model
SHUFFLED = 12  # places by which a command may come early or late


def command(model: str, number: int, seq: int) -> tuple[str, dict[str, Any]]:
    """Path and content of a command: passes, steps, forward passes, checkpoints, and some that are refused."""
    if seq == COMMANDS or seq % 100 == 50:
        name = "end" if seq == COMMANDS else f"at-{seq}"
        return "save_weights", {"json": {"model_id": model, "seq_id": seq, "path": name}}
    if seq % 4 == 0:
        adam = {"learning_rate": 0.01, "weight_decay": 0.1, "grad_clip_norm": seq % 3}
        return "optim_step", {"json": {"model_id": model, "seq_id": seq, "adam_params": adam}}
    request = pb.ForwardBackwardRequest(
        model_id=model,
        seq_id=seq,
        data=data(number + seq, *range(seq % 3)),
        loss_fn="dro" if seq % 97 == 1 else "cross_entropy",
        forward_only=seq % 8 == 7,
    )
    return "forward_backward", {"data": request.SerializeToString()}


class RoughClient:
    """Sends the commands of all models and asks for their results, over a bad network if there is a `chosen`."""

    def __init__(self, url: str, chosen: random.Random | None) -> None:
        self._url = f"{url}/api/v1"
        self._chosen = chosen
        self.counts: Counter[str] = Counter()
        self.results: dict[tuple[int, int], bytes] = {}
        self.has_more = asyncio.Event()

    async def run(self, models: list[str]) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(headers=KillableTrainer.headers, connector=connector)
        async with self._http, asyncio.TaskGroup() as group:
            for number, model in enumerate(models):
                group.create_task(self._run_model(model, number))

    async def _run_model(self, model: str, number: int) -> None:
        order = list(range(1, COMMANDS + 1))
        if self._chosen is not None:
            order.sort(key=lambda seq: seq + self._chosen.uniform(0, SHUFFLED))
        places = asyncio.Semaphore(IN_FLIGHT)

        async def do(seq: int) -> None:
            result = await self._result(*command(model, number, seq))
            self.results[number, seq] = result.replace(model.encode(), b"MODEL")
            self.has_more.set()
            places.release()

        async with asyncio.TaskGroup() as group:
            for seq in order:
                await places.acquire()
                group.create_task(do(seq))

    async def _result(self, path: str, content: dict[str, Any]) -> bytes:
        for _ in range(0 if self._chosen is None else self._chosen.choice((0, 1, 2, 3, 5))):
            self.counts["repeated"] += 1
            await self._post(path, **content)
        request_id = json.loads(await self._surely(path, **content))["request_id"]
        while b"try_again" in (result := await self._surely("retrieve_future", json={"request_id": request_id})):
            pass
        return result

    async def _surely(self, path: str, **content: Any) -> bytes:
        while True:
            if (answer := await self._post(path, **content)) is not None:
                return answer

    async def _post(self, path: str, **content: Any) -> bytes | None:
        """None: it was dropped on its way, or its answer was, or the trainer is away."""
        if self._chosen is not None:
            await asyncio.sleep(self._chosen.choice((0, 0, 0.01, 0.1)))
            if self._chosen.random() < 0.05:
                self.counts["requests"] += 1
                self.counts["dropped"] += 1
                return None
        try:
            async with self._http.post(f"{self._url}/{path}", **content) as answer:
                body = await answer.read()
        except aiohttp.ClientError:
            self.counts["cut off"] += 1
            await asyncio.sleep(0.2)
            return None
        assert answer.status == 200, body
        self.counts["requests"] += 1
        if self._chosen is not None and self._chosen.random() < 0.05:
            self.counts["answers lost"] += 1
            return None
        return body


async def kill_often(trainer: KillableTrainer, client: RoughClient, chosen: random.Random) -> None:
    """At random places of the run, which are counted by results."""
    for at in sorted(chosen.sample(range(20, MODELS * COMMANDS - 20), KILLS)):
        while len(client.results) < at:
            client.has_more.clear()
            await client.has_more.wait()
        await asyncio.sleep(chosen.uniform(0, 0.05))
        trainer.kill()
        client.counts["kills"] += 1
        await asyncio.to_thread(trainer.start)


def run(config: Path, folder: Path, chosen: random.Random | None) -> tuple[Any, Any, Counter[str]]:
    """Results by model and number, and the last states of the models."""
    trainer = KillableTrainer(config, folder)
    trainer.start()
    try:
        raw = RawClient(trainer.url, headers=trainer.headers)
        session = raw.session()
        models = [raw.model(number, session, seed=number) for number in range(MODELS)]

        async def work() -> RoughClient:
            client = RoughClient(trainer.url, chosen)
            async with asyncio.TaskGroup() as group:
                group.create_task(client.run(models))
                if chosen is not None:
                    group.create_task(kill_often(trainer, client, chosen))
            return client

        client = asyncio.run(work())
    finally:
        trainer.kill()
    return client.results, states(folder, "end"), client.counts


def test_a_rough_run_is_a_calm_run(tmp_path: Path):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    config = make_demo(tmp_path / "toy")
    calm_results, calm_states, _ = run(config, tmp_path / "calm", None)
    results, found, counts = run(config, tmp_path / "rough", random.Random(seed))
    print(dict(counts))
    assert results == calm_results
    assert len(found) == MODELS
    assert found == calm_states
    assert counts["kills"] == KILLS
    assert counts["requests"] >= REQUESTS
