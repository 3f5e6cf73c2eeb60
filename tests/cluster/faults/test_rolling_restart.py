"""A rolling restart of every process under load, without one failed request. A cluster of its own, with two routers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml
from support.clusters.running_cluster import RunningCluster, is_ready, running_cluster
from support.waiting import wait_until

from cluster.local.initial_config import Host, Pools, initial_config
from cluster.local.memory_plan import ModelSizes
from process.free_ports import free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # every process starts again, one after the other

NUM_CLIENTS = 4
NUM_TOKENS = 24
POOLS = {"unified": Pools(0, 0, 2, 1), "pairs": Pools(2, 2, 0, 1)}


@pytest.fixture(params=POOLS)
def cluster_of_two(request, model_dir: Path, adapters: dict[str, Path], tmp_path: Path) -> Iterator[RunningCluster]:
    """Two workers of each role, as `prelude init` writes them for this machine."""
    written = yaml.safe_load(
        initial_config(model_dir, ModelSizes.read(model_dir), Host.this(0, None), POOLS[request.param])
    )
    sections = {name: written[name] for name in ("engine", "workers", "adapter_limits", "residency")}
    few = {name: adapters[name] for name in ("a0", "reft")}
    with running_cluster(tmp_path, model_dir, few, **sections) as running:
        yield running


@contextlib.contextmanager
def second_router(cluster: RunningCluster, folder: Path) -> Iterator[SecondRouter]:
    """Another router of the cluster, which nobody restarts by itself."""
    router = SecondRouter(folder / "second.yaml", folder / "second.log")
    data = yaml.safe_load((folder / "cluster.yaml").read_text())
    data["router"] |= {"port": router.port, "admin": {"port": 0}}
    router.config.write_text(yaml.safe_dump(data))
    router.start()
    try:
        yield router
    finally:
        router.process.kill()
        router.process.wait()


@dataclass
class SecondRouter:
    config: Path
    log: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "cli.main", "router", "--config", str(self.config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(lambda: is_ready(f"{self.url}/ready"))


@dataclass
class Load:
    """Clients that ask without pause, as behind a load balancer: the other router, if one refuses to connect.

    Half of the requests have a connection of their own. The others take kept ones, which a router may close just when
    the next request is sent: `num_races` counts them.
    """

    routers: tuple[str, ...]
    num_answers: int = 0
    num_refused: int = 0
    num_races: int = 0
    failures: list[str] = field(default_factory=list)
    is_over: bool = False

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(NUM_CLIENTS)))

    async def _client(self, number: int) -> None:
        async with httpx.AsyncClient(timeout=120) as kept:
            for turn in itertools.count():
                if self.is_over:
                    return
                body = {
                    "model": "demo", "prompt": f"Please tell me about the sea {number} {turn}",
                    "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": turn % 2 == 0,
                }  # fmt: skip
                if adapter := (None, "a0", "reft")[turn % 3]:
                    body["adapter"] = adapter
                first = (number + turn) % 2
                routers = self.routers[first:] + self.routers[:first]
                if turn % 4 < 2:
                    problem = await self._ask(kept, routers, body)
                else:
                    async with httpx.AsyncClient(timeout=120) as new:
                        problem = await self._ask(new, routers, body)
                if problem:
                    self.failures.append(problem)
                else:
                    self.num_answers += 1

    async def _ask(self, client: httpx.AsyncClient, routers: tuple[str, ...], body: dict) -> str:
        """What was wrong with the answer; empty if nothing was."""
        problem = ""
        for router in routers:
            is_new = False

            async def look(event: str, _info: object) -> None:
                nonlocal is_new
                is_new |= event == "connection.connect_tcp.started"

            try:
                url, extensions = f"{router}/v1/completions", {"trace": look}
                async with client.stream("POST", url, json=body, extensions=extensions) as answer:
                    try:
                        await answer.aread()
                    except httpx.TransportError as error:
                        return f"{router}: the answer broke off: {error!r}"
            except httpx.ConnectError as error:  # it has stopped listening
                self.num_refused += 1
                problem = f"{router}: {error!r}"
                continue
            except (httpx.RemoteProtocolError, httpx.ReadError) as error:  # it disconnected without an answer
                problem = f"{router}, {'a new' if is_new else 'a kept'} connection: {error!r}"
                if is_new:
                    return problem
                self.num_races += 1
                continue
            except httpx.TransportError as error:
                return f"{router}: {error!r}"
            if answer.status_code != 200:
                return f"{answer.status_code}: {answer.text}"
            if not body["stream"]:
                found = answer.json()["usage"]["completion_tokens"]
                return "" if found == NUM_TOKENS else f"{found} tokens"
            events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
            if not events or events[-1] != "[DONE]":
                return f"the stream ended with {events[-1:]}"
            last = [json.loads(event) for event in events[:-1]][-1]
            return "" if "error" not in last else str(last["error"])
        return problem


def test_no_request_fails(cluster_of_two: RunningCluster, tmp_path: Path):
    cluster = cluster_of_two

    async def scenario(router: SecondRouter) -> Load:
        load = Load((cluster.url, router.url))
        clients = asyncio.create_task(load.run())
        try:
            for name in (*cluster.config.workers, "router"):
                await more_answers(load)
                before = cluster.process(name)
                before.terminate()
                await asyncio.to_thread(before.wait, 90)
                await asyncio.to_thread(cluster.wait_for_another, partial(cluster.process, name), before.pid, 30)
                await asyncio.to_thread(cluster.wait_ready, 400)
                assert not load.failures, f"while {name} was restarted: {load.failures[:3]}"
            await more_answers(load)
            router.process.terminate()
            await asyncio.to_thread(router.process.wait, 60)
            await asyncio.to_thread(router.start)
            await more_answers(load)
            name = next(iter(cluster.config.workers))
            for command in (["drain", name], ["undrain", name]):  # without a restart
                await asyncio.to_thread(prelude_workers, tmp_path, command)
                await more_answers(load)
        finally:
            load.is_over = True
            await clients
        return load

    with second_router(cluster, tmp_path) as router:
        load = asyncio.run(scenario(router))
    print(
        f"{load.num_answers} answers during the restarts; {load.num_refused} connections refused, "
        f"{load.num_races} kept ones closed while a request was sent"
    )
    assert load.failures == []
    assert load.num_races <= 2 * NUM_CLIENTS  # each client has one to each of the two routers that were stopped


async def more_answers(load: Load) -> None:
    """Wait until every client has had some more answers, or one has failed."""
    wanted = load.num_answers + 3 * NUM_CLIENTS
    async with asyncio.timeout(120):
        while load.num_answers < wanted and not load.failures:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def prelude_workers(folder: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "cli.main", "workers", *arguments, "--config", str(folder / "cluster.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
