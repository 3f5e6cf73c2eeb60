"""What clients see while one process of a real cluster is killed or stopped: outcomes, times, what is left behind.

Each case has requests in flight (streams under several adapters) and, from the signal until every process is ready
again, one short request a second. A stopped process is never continued: an agent has to notice that of its engine, and
`prelude up` that of a router or an agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import psutil

from adapters.model.base_model import BaseModel
from bench.errors import BenchError, SystemFailed
from bench.measuring import provenance
from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from cluster.control.transport import PLAIN
from cluster.errors import StartError
from cluster.local import shared_memory
from cluster.local.demo import make_model
from cluster.local.supervisor import LocalCluster, local_cluster
from samples.random_adapters import write_random_lora

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
LAYOUTS = {
    "pair": {"prefill-0": "prefill", "decode-0": "decode"},
    "unified": {"unified-0": "unified", "unified-1": "unified"},
}
VICTIMS = {"pair": ("prefill-0", "decode-0"), "unified": ("unified-0",)}
_PARTS = ("agent", "server", "scheduler", "detokenizer")
_NUM_ADAPTERS = 4
_PROMPT_TOKENS = 96
_QUIET_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Options:
    """One run."""

    layout: str = "pair"
    in_flight: tuple[int, ...] = (0, 32)
    signals: tuple[str, ...] = ("kill", "stop")
    parts: tuple[str, ...] = ("router", *_PARTS)
    generated_tokens: int = 48
    client_deadline_s: float = 120.0  # after which a client gives up: a hang
    ready_within_s: float = 600.0


QUICK = Options(layout="unified", in_flight=(4,), signals=("kill",), parts=("scheduler",))


@dataclass(slots=True)
class Seen:
    """What some clients of one case saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0  # from the signal, or from its own beginning if that was later
    num_wrong: int = 0  # complete answers that are not the adapter's

    def add(self, outcome: str, seconds: float) -> None:
        self.num_wrong += outcome == "wrong answer"
        self.outcomes[outcome] += 1
        self.longest_s = max(self.longest_s, seconds)


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run all cases, print and write them; returns the file's content. Raises BenchError."""
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise BenchError(f"{json_path}: there is no folder {json_path.parent}")
    document: dict[str, Any] = {
        "benchmark": "chaos",
        "commit": provenance.commit(),
        "command": command,
        "hardware": provenance.hardware("cpu"),
        "versions": provenance.versions(),
        "settings": asdict(options),
        "rows": [],
    }
    with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
        try:
            for row in _drive(options, Path(folder), progress):
                document["rows"].append(row)
                if json_path is not None:  # a run takes long: keep what there is
                    json_path.write_text(json.dumps(document, indent=2) + "\n")
        except StartError as error:
            raise SystemFailed(str(error)) from error
    return document


def _drive(options: Options, folder: Path, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The rows of all cases, each as soon as it is there."""
    loop = asyncio.new_event_loop()
    rows = _rows(options, folder, progress)
    try:
        while True:
            try:
                yield loop.run_until_complete(anext(rows))
            except StopAsyncIteration:
                return
    finally:
        loop.run_until_complete(rows.aclose())
        loop.close()


async def _rows(options: Options, folder: Path, progress: Callable[[str], None]):
    config = await asyncio.to_thread(prepare, options.layout, _NUM_ADAPTERS, folder)
    progress(f"starting the cluster: {', '.join(LAYOUTS[options.layout])}")
    async with (
        local_cluster(config, folder / "logs") as cluster,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session,
    ):
        chaos = ChaosCluster(options, cluster, session)
        await chaos.learn_answers()
        for name in options.signals:
            for worker, part in _targets(options):
                for in_flight in options.in_flight:
                    row = await chaos.case(worker, part, name, in_flight)
                    progress(f"  {row}")
                    yield row


def _targets(options: Options) -> list[tuple[str, str]]:
    """(worker, part); the router is no part of a worker."""
    of_workers = [(worker, part) for worker in VICTIMS[options.layout] for part in options.parts if part != "router"]
    return ([("", "router")] if "router" in options.parts else []) + of_workers


def prepare(layout: str, num_adapters: int, folder: Path) -> ClusterConfig:
    """A cluster with a demo model and adapters a0, a1, …, whose answers differ."""
    make_model(folder / "model")
    base = BaseModel.read(folder / "model")
    adapters = {}
    for number in range(num_adapters):
        path = write_random_lora(folder / f"a{number}", base, number, std=0.6)
        adapters[f"a{number}"] = {"path": path}
    return ClusterConfig.model_validate(
        {
            "model": {"path": folder / "model", "name": "bench", "dtype": "float32"},
            "engine": {"device": "cpu", "max_total_tokens": 16384, "chunked_prefill_tokens": 64},
            "router": {"port": 0},
            "workers": {name: {"role": role} for name, role in LAYOUTS[layout].items()},
            "adapters": adapters,
        }
    )


class ChaosCluster:
    """A running cluster, and clients that know the right answers."""

    def __init__(self, options: Options, cluster: LocalCluster, session: aiohttp.ClientSession) -> None:
        self._options = options
        self._cluster = cluster
        self._session = session
        self._answers: dict[tuple[int, int], str] = {}  # (adapter, tokens) -> text
        self._num_segments = 0

    async def learn_answers(self) -> None:
        for adapter in range(_NUM_ADAPTERS):
            for tokens in (self._options.generated_tokens, 4):
                outcome, text = await self.ask(adapter, tokens)
                if outcome != "answered":
                    raise SystemFailed(f"before the first case, a request ended as: {outcome}")
                self._answers[adapter, tokens] = text
        self.count_segments()

    def count_segments(self) -> None:
        """Shared memory that there is now is no leak."""
        self._num_segments = len(shared_memory.segments())

    async def case(self, worker: str, part: str, name: str, in_flight: int) -> dict[str, Any]:
        await self.until_ready()
        flying, probing = Seen(), Seen()
        first_byte, signalled_at = asyncio.Event(), [float("inf")]

        async def client(number: int, tokens: int, seen: Seen) -> None:
            began_at, adapter = time.monotonic(), number % _NUM_ADAPTERS
            outcome, text = await self.ask(adapter, tokens, first_byte)
            if outcome == "answered" and text != self._answers[adapter, tokens]:
                outcome = "wrong answer"
            seen.add(outcome, max(0.0, time.monotonic() - max(began_at, min(signalled_at[0], time.monotonic()))))

        async with asyncio.TaskGroup() as group:
            for number in range(in_flight):
                group.create_task(client(number, self._options.generated_tokens, flying))
            if in_flight:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(first_byte.wait(), 30)
            victim = self.process(worker, part)
            signalled_at[0] = time.monotonic()
            victim.send_signal(SIGNALS[name])
            probes = 0
            while time.monotonic() - signalled_at[0] < self._options.ready_within_s:
                group.create_task(client(probes, 4, probing))
                probes += 1
                await asyncio.sleep(1.0)
                if not _is_there(victim) and await self.is_ready():
                    break
            ready_s = time.monotonic() - signalled_at[0]
        return {
            "victim": f"{worker} {part}".strip(),
            "signal": name,
            "in_flight": in_flight,
            "outcomes": dict(flying.outcomes),
            "longest_s": round(flying.longest_s, 1),
            "probe_outcomes": dict(probing.outcomes),
            "longest_probe_s": round(probing.longest_s, 1),
            "ready_s": round(ready_s, 1),
            "wrong_answers": flying.num_wrong + probing.num_wrong,
            "left_behind": await self.left_behind(),
        }

    async def ask(self, adapter: int, tokens: int, first_byte: asyncio.Event | None = None) -> tuple[str, str]:
        """How a streamed request ended, and its text."""
        body = {
            "model": "bench",
            "adapter": f"a{adapter}",
            "prompt": [20 + (7 * i + adapter) % 400 for i in range(_PROMPT_TOKENS)],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        url, text = f"{self._cluster.url}/v1/completions", ""
        try:
            async with (
                asyncio.timeout(self._options.client_deadline_s),
                self._session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=None)) as answer,
            ):
                if answer.status != 200:
                    return f"{answer.status} {(await answer.json())['error']['code']}", ""
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return f"event {event['error']['code']}", ""
                        if first_byte is not None:
                            first_byte.set()
                        text += event["choices"][0]["text"] if event["choices"] else ""
                    elif line.startswith(b"data: [DONE]"):
                        return "answered", text
                return "stream cut off", ""
        except TimeoutError:
            return "hung", ""
        except (aiohttp.ClientError, OSError):
            return "connection broken", ""

    def process(self, worker: str, part: str) -> psutil.Process:
        for child in psutil.Process().children():
            words = child.cmdline()
            if part == "router" and "router" in words:
                return child
            if worker and worker in words:
                if part == "agent":
                    return child
                server = next(each for each in child.children() if "engine.launch" in each.cmdline())
                if part == "server":
                    return server
                for each in server.children(recursive=True):
                    if f"sglang::{part}" in " ".join(each.cmdline()):
                        return each
        raise SystemFailed(f"there is no process {worker} {part}")

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
        deadline = time.monotonic() + self._options.ready_within_s
        while not await self.is_ready():
            if time.monotonic() > deadline:
                raise SystemFailed(f"the cluster was not ready again within {self._options.ready_within_s:g} s")
            await asyncio.sleep(0.5)

    async def left_behind(self) -> list[str]:
        """What a quiet cluster should not have: requests, KV tokens in use, more shared memory than before."""
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
                for name, worker in self._cluster.config.workers.items():
                    address = f"{worker.host}:{worker.control_port}"
                    async with PLAIN.channel(address, worker.role, name) as channel:
                        engine = await WorkerControlStub(channel).Describe(pb.DescribeRequest(), timeout=5)
                    headers = {"authorization": f"Bearer {engine.engine_key}"}
                    async with self._session.get(f"{engine.engine_url}/v1/loads", headers=headers) as answer:
                        load = (await answer.json())["loads"][0]
                    for key in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens"):
                        if load[key]:
                            left.append(f"{name}: {key} {load[key]}")
        except (aiohttp.ClientError, grpc.aio.AioRpcError, OSError, TimeoutError) as error:
            left.append(f"not to be seen: {type(error).__name__}")
        if (more := len(shared_memory.segments()) - self._num_segments) > 0:
            left.append(f"{more} more segments of shared memory")
        return left


def _is_there(victim: psutil.Process) -> bool:
    """Whether a process that should have been replaced still exists."""
    try:
        return victim.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
