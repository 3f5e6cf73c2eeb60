"""A cluster of real engines whose processes can be found, asked and looked at while some of them are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import httpx
import psutil
from support.adapters.random_adapters import write_random_lora
from support.clusters.configs import config_of
from support.clusters.running_cluster import RunningCluster

from adapters.model.base_model import BaseModel
from cluster.config.schema import ClusterConfig
from cluster.config.workers import WorkerConfig
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from cluster.local import shared_memory
from cluster.local.demo import make_model
from cluster.local.supervisor import LocalCluster, local_cluster

LAYOUTS = {
    "pair": {"prefill-0": "prefill", "decode-0": "decode"},
    "pairs": {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"},
    "unified": {"unified-0": "unified", "unified-1": "unified"},
    "2p+1d": {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode"},
    "3p+1d": {"prefill-0": "prefill", "prefill-1": "prefill", "prefill-2": "prefill", "decode-0": "decode"},
}
READY_WITHIN_S = 600.0
_CLIENT_DEADLINE_S = 120.0  # after which a client gives up: a hang
_QUIET_WITHIN_S = 20.0
_MORE_DESCRIPTORS = 64  # than before, of one process; connections are kept


@dataclass(frozen=True, slots=True)
class Kind:
    """Sizes of a request, in tokens."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Answer:
    """How one request ended. Times are of `time.monotonic`."""

    outcome: str
    text: str = ""
    request_id: str = ""
    first_byte_at: float = float("inf")
    ended_at: float = 0.0


@contextlib.asynccontextmanager
async def shaken_cluster(layout: str, num_adapters: int, folder: Path, **sections: Any) -> AsyncIterator[ShakenCluster]:
    """A cluster with a demo model and adapters a0, a1, …, whose answers differ, and more `sections` of cluster.yaml."""
    config = await asyncio.to_thread(_prepare, layout, num_adapters, folder, sections)
    async with (
        local_cluster(config, folder / "logs") as cluster,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session,
    ):
        yield ShakenCluster(cluster, session)


def _prepare(layout: str, num_adapters: int, folder: Path, sections: dict[str, Any]) -> ClusterConfig:
    make_model(folder / "model")
    base = BaseModel.read(folder / "model")
    names = [f"a{number}" for number in range(num_adapters)]
    paths = [write_random_lora(folder / name, base, number, std=0.6) for number, name in enumerate(names)]
    return config_of(
        LAYOUTS[layout],
        model={"path": folder / "model", "name": "bench", "dtype": "float32"},
        engine={"device": "cpu", "max_total_tokens": 16384, "chunked_prefill_tokens": 64},
        router={"port": 0},
        adapters={name: {"path": path} for name, path in zip(names, paths, strict=True)},
        **sections,
    )


class ShakenCluster:
    """A running cluster."""

    def __init__(self, cluster: LocalCluster, session: aiohttp.ClientSession) -> None:
        self._cluster, self._session = cluster, session
        model = cluster.config.model.path
        self._running = RunningCluster(cluster.url, model, {}, Path(), cluster.config, psutil.Process())
        self._abandoned: set[Path] = set()
        self._uses: dict[str, Use] = {}

    def uses(self) -> dict[str, Use]:
        """By name: the router's, each agent's and each engine's."""
        found = {}
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                worker = next((name for name in self._cluster.config.workers if name in words), None)
                if worker is not None:
                    found[f"{worker} agent"] = _use([child])
                    if engine := child.children(recursive=True):
                        found[f"{worker} engine"] = _use(engine)
                elif "router" in words:
                    found["router"] = _use([child, *child.children(recursive=True)])
        return found

    def count_what_is_kept(self) -> None:
        """Abandoned shared memory and descriptors that there are now are no leak."""
        self._abandoned = shared_memory.abandoned(shared_memory.segments())
        self._uses = self.uses()

    async def ask(self, adapter: int, kind: Kind, started: asyncio.Event | None = None) -> Answer:
        """Send a streamed request; `started` is set by its first text."""
        body = {
            "model": "bench",
            "adapter": f"a{adapter}",
            "prompt": [20 + (7 * i + adapter) % 400 for i in range(kind.prompt)],
            "max_tokens": kind.answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{self._cluster.url}/v1/completions"
        text, request_id, first_byte_at = "", "", float("inf")

        def ended(outcome: str) -> Answer:
            return Answer(outcome, text, request_id, first_byte_at, time.monotonic())

        try:
            async with (
                asyncio.timeout(_CLIENT_DEADLINE_S),
                self._session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=None)) as answer,
            ):
                request_id = answer.headers.get("x-request-id", "")
                if answer.status != 200:
                    return ended(f"{answer.status} {(await answer.json())['error']['code']}")
                async for line in answer.content:
                    first_byte_at = min(first_byte_at, time.monotonic())
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return ended(f"event {event['error']['code']}")
                        if started is not None:
                            started.set()
                        text += event["choices"][0]["text"] if event["choices"] else ""
                    elif line.startswith(b"data: [DONE]"):
                        return ended("answered")
                return ended("stream cut off")
        except TimeoutError:
            return ended("hung")
        except (aiohttp.ClientError, OSError):
            return ended("connection broken")
        except (ValueError, KeyError, TypeError):
            return ended("broken answer")

    async def phases(self, num_waiting: int) -> dict[str, str]:
        """Phases by request id, as soon as so many requests wait for something at the router, or half a second later.

        Empty if the router does not answer.
        """
        deadline, found = time.monotonic() + 0.5, {}
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
                async with asyncio.timeout(1), self._session.get(f"{self._cluster.admin_url}/debug/requests") as page:
                    requests = (await page.json())["requests"]
                found = {each["request_id"]: each["sequences"][0]["phase"] for each in requests if each["sequences"]}
            if sum(phase != "relaying" for phase in found.values()) >= num_waiting or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0)

    def process(self, worker: str, part: str) -> psutil.Process:
        if part in ("router", "agent"):
            return self._running.process(worker or part)
        try:
            return self._running.engine_parts(worker)[part]
        except StopIteration:
            raise LookupError(f"{worker} has no engine") from None

    def agent(self, worker: str) -> AbstractAsyncContextManager[WorkerControlStub]:
        """An agent's control service."""
        return _called(self._cluster.config.workers[worker])

    async def role(self, worker: str) -> str:
        async with self.agent(worker) as agent:
            description = await agent.Describe(pb.DescribeRequest(), timeout=10)
        return pb.Role.Name(description.role).removeprefix("ROLE_").lower()

    def is_running(self, worker: str, part: str) -> bool:
        """Whether there is such a process."""
        try:
            return self.process(worker, part).is_running()
        except (LookupError, psutil.NoSuchProcess):
            return False

    def _ready_urls(self) -> list[str]:
        workers = self._cluster.config.workers.values()
        return [
            f"{self._cluster.admin_url}/ready",
            *(f"http://{each.host}:{each.metrics_port}/ready" for each in workers),
        ]

    async def is_ready(self) -> bool:
        try:
            for url in self._ready_urls():
                async with asyncio.timeout(5), self._session.get(url) as answer:
                    page = await answer.json()
                    if answer.status != 200 or not all(w["ready"] for w in page.get("workers", {}).values()):
                        return False
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return False
        return True

    async def until_ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while not await self.is_ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the cluster was not ready again within {READY_WITHIN_S:g} s")
            await asyncio.sleep(0.5)

    async def left_behind(self) -> list[str]:
        """What a quiet cluster should not have: requests, KV, more shared memory or descriptors than before."""
        deadline = time.monotonic() + _QUIET_WITHIN_S
        while True:
            left = await self._look()
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.5)

    async def _look(self) -> list[str]:
        left = []
        try:
            async with asyncio.timeout(10):
                async with self._session.get(f"{self._cluster.admin_url}/debug/requests") as answer:
                    if requests := (await answer.json())["requests"]:
                        left.append(f"{len(requests)} requests in the router")
                for name in self._cluster.config.workers:
                    answer = await asyncio.to_thread(self._running.ask_engine, name, "GET", "/v1/loads")
                    in_use = _in_use(answer.json()["loads"][0])
                    left += [f"{name}: {key} {count}" for key, count in in_use.items()]
        except (aiohttp.ClientError, httpx.HTTPError, grpc.aio.AioRpcError, OSError, TimeoutError) as error:
            left.append(f"not to be seen: {type(error).__name__}")
        # Other programs' segments count only if nobody maps them: an engine that runs beside this is no leak.
        if more := shared_memory.abandoned(shared_memory.segments()) - self._abandoned:
            left.append(f"shared memory: {', '.join(sorted(path.name for path in more))}")
        for of, use in self.uses().items():
            if of in self._uses and use.descriptors > (before := self._uses[of].descriptors) + _MORE_DESCRIPTORS:
                left.append(f"{of}: {use.descriptors} descriptors, {before} before")
        return left


@contextlib.asynccontextmanager
async def _called(worker: WorkerConfig) -> AsyncIterator[WorkerControlStub]:
    async with grpc.aio.insecure_channel(f"{worker.host}:{worker.control_port}") as channel:
        yield WorkerControlStub(channel)


def _in_use(load: dict[str, Any]) -> dict[str, int]:
    """Of an engine's load: requests, KV tokens, and the queues of requests whose KV is on its way, if not 0."""
    counts = {key: load[key] for key in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")}
    counts |= load.get("queues") or {}
    counts |= {key: count for key, count in (load.get("disaggregation") or {}).items() if key.endswith("_reqs")}
    return {key: count for key, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class Use:
    """Of one process, or of all processes of one engine. `pid` is the first one's: another one is another life."""

    pid: int
    descriptors: int


def _use(processes: list[psutil.Process]) -> Use:
    return Use(processes[0].pid, sum(each.num_fds() for each in processes))
