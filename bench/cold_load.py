"""Benchmark of cold adapters: one load, sixteen concurrent loads, residents' TTFT meanwhile, too little host memory.

A unified worker behind its router serves a model of 32 layers with LoRA on seven projections: 448 tensors per PEFT
file. All adapters are in the store; a cold one has not been requested before.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from adapters.errors import AdapterError
from adapters.formats import Limits, read_adapter
from adapters.model.base_model import BaseModel
from adapters.packed import PACKED_NAME, write_for_engine
from bench.errors import SystemFailed
from bench.load.options import Endpoint
from bench.load.strict import closed_load, open_load, requests_per_s
from bench.measuring import provenance
from bench.measuring.output import growing_json, require_folders
from bench.measuring.quantile import quantile
from bench.measuring.stage_times import Stages, means_ms, stages_at
from bench.systems.imported_adapters import import_random_adapters
from bench.systems.models import write_model
from bench.systems.slow_store import BUCKET, slow_store
from bench.workloads.session import Session
from bench.workloads.workload import Stream, Workload
from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from cluster.errors import ANSWER_MARGIN_S, StartError
from cluster.local.demo import make_model
from cluster.local.supervisor import local_cluster
from samples.random_adapters import write_random_lora

_WORKER = "unified-0"
_VOCABULARY = 600
_ENSURE_DEADLINE_S = 120.0
_STAGES = "prelude_worker_adapter_load_stage_seconds"
_TIMEOUT = aiohttp.ClientTimeout(total=300)


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    model: str | None = None  # a key of bench.systems.models.MODELS; None: of the next two sizes
    hidden: int = 256
    num_layers: int = 32
    rank: int = 16
    num_slots: int = 8
    at_once: int = 16  # concurrent cold loads
    repeats: int = 3
    num_single: int = 8  # cold loads one after the other, per repeat
    num_resident: int = 4  # adapters whose TTFT is measured
    num_cold: int = 64  # adapters that arrive meanwhile
    requests_per_cold: int = 2  # requests for residents per cold arrival
    budget: int = 32  # adapters that fit in host memory
    overcommit: int = 4  # adapters in use, as a multiple of the budget
    concurrency: int = 8
    num_requests: int = 96  # per throughput measurement
    prompt_tokens: int = 32
    generated_tokens: int = 8
    store_delay_ms: float = 0.0  # latency of an S3 store; 0: the store is a folder
    use: float = 0.5  # share of the measured throughput that is offered while TTFT is measured
    device: str = "cpu"  # or "cuda"
    engine_arguments: tuple[str, ...] = ()

    @property
    def num_adapters(self) -> int:
        """Every part of the benchmark has its own adapters, which are cold when it starts."""
        return self.num_for_ready + self.budget * self.overcommit + self.num_resident + self.repeats * self.num_cold

    @property
    def num_for_ready(self) -> int:
        return self.repeats * (self.num_single + self.at_once)


QUICK = Options(
    num_layers=4, hidden=64, at_once=4, repeats=1, num_single=3, num_cold=4, budget=4, num_requests=16, concurrency=4
)


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print, write the file; returns its content. Raises BenchError."""
    require_folders(json_path)
    facts = provenance.head("cold-load", command, asdict(options), options.device)
    document: dict[str, Any] = {**facts}
    with growing_json(document, json_path, "after all loads") as write:

        def add(found: dict[str, Any]) -> None:
            document.update(found)
            write()

        with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
            try:
                asyncio.run(_measure(options, Path(folder), add, progress))
            except (AdapterError, StartError) as error:
                raise SystemFailed(str(error)) from error
    for key, value in document.items():
        if key not in facts:
            progress(f"  {key:<34} {value}")
    return document


async def _measure(
    options: Options, folder: Path, add: Callable[[dict[str, Any]], None], progress: Callable[[str], None]
) -> None:
    """Hands all that is known on after each repeat of each part: medians of the repeats so far."""
    model = options.model or f"a model of {options.num_layers} layers"
    progress(f"Creating {model} and {options.num_adapters} adapters.")
    config = await asyncio.to_thread(_prepare, options, folder)
    if options.device == "cpu":  # it measures a CPU engine's loader
        add(await asyncio.to_thread(_loader_slice, options, folder))
    progress("Starting a unified worker and its router.")
    async with AsyncExitStack() as stack:
        if options.store_delay_ms:
            endpoint = stack.enter_context(slow_store(folder / "store", options.store_delay_ms / 1000))
            store = config.store.model_copy(update={"url": f"s3://{BUCKET}", "s3_endpoint_url": endpoint})
            config = config.model_copy(update={"store": store})
        cluster = await stack.enter_async_context(local_cluster(config, folder / "logs"))
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=_TIMEOUT))
        worker = cluster.config.workers[_WORKER]
        async with grpc.aio.insecure_channel(f"{worker.host}:{worker.control_port}") as channel:
            lease_s, agent_url = config.residency.lease_s, f"http://{worker.host}:{worker.metrics_port}"
            bench = _Bench(options, session, cluster.url, agent_url, WorkerControlStub(channel), lease_s)
            async for found in bench.time_to_ready(progress):
                add(found)
            async for found in bench.throughput(progress):
                add(found)
            async for residents in bench.first_tokens(found["all_resident_requests_per_s"], progress):
                add(residents)


def _prepare(options: Options, folder: Path) -> ClusterConfig:
    """Create the model, import the adapters, and return the cluster's configuration."""
    if options.model is None:
        make_model(folder / "model", hidden=options.hidden, num_layers=options.num_layers)
    else:
        write_model(options.model, folder / "model", options.device, options.engine_arguments)
    config = ClusterConfig.model_validate(
        {
            "model": {"path": folder / "model", "name": "bench", "dtype": "bfloat16"},
            "engine": {
                "device": options.device,
                "max_total_tokens": 32768,
                "max_running_requests": 64,
                "chunked_prefill_tokens": 2048,
                "extra_arguments": list(options.engine_arguments),
            },
            "router": {"port": 0},
            "workers": {_WORKER: {"role": "unified"}},
            "adapter_limits": {"max_rank": options.rank, "slots": options.num_slots},
            "catalog": {"url": f"sqlite:///{folder}/catalog.db"},
            "store": {"url": f"file://{folder}/store"},
        }
    )
    names = [_name(number) for number in range(options.num_adapters)]
    num_bytes = import_random_adapters(config, names, os.cpu_count() or 1)
    host_bytes = options.budget * num_bytes + num_bytes // 2
    return config.model_copy(update={"residency": config.residency.model_copy(update={"host_bytes": host_bytes})})


def _loader_slice(options: Options, folder: Path) -> dict[str, Any]:
    base = BaseModel.read(folder / "model")
    folders = []
    for number in range(3):
        own = folder / f"slice-{number}"
        source = write_random_lora(own / "peft", base, number, rank=options.rank, dtype="bfloat16")
        write_for_engine(read_adapter(source, base, Limits()), base, "bfloat16", own / "packed")
        folders.append(own)
    words = [sys.executable, "-m", "engine.adapter_slots.loader_slice", folder / "model", options.num_slots, *folders]
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode:
        raise SystemFailed(f"the loader slice could not be measured: {done.stderr[-1000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "adapter_tensors": found["num_tensors"],
        "adapter_bytes": (folders[0] / "packed" / PACKED_NAME).stat().st_size,
        "loader_peft_ms": round(found["peft_ms"], 3),
        "loader_packed_ms": round(found["packed_ms"], 3),
        "loader_packed_to_slot_ms": round(found["packed_to_slot_ms"], 3),
        "loader_speedup": round(found["peft_ms"] / found["packed_ms"], 2),
    }


def _name(number: int) -> str:
    return f"adapter-{number}"


class _Bench:
    """A cluster under load, and its adapters that are still cold."""

    def __init__(
        self,
        options: Options,
        session: aiohttp.ClientSession,
        url: str,
        agent_url: str,
        stub: WorkerControlStub,
        lease_s: float = 0.0,
    ) -> None:
        self._options = options
        self._lease_s = lease_s
        self._session = session
        self._url = url
        self._agent_url = agent_url
        names = tuple(map(_name, range(options.num_adapters)))
        self._endpoint = Endpoint(url, "bench", names)
        self._stub = stub
        self._cold = itertools.count()  # numbers of adapters that were not requested yet
        self._seeds = itertools.count()

    async def time_to_ready(self, progress: Callable[[str], None]) -> AsyncIterator[dict[str, Any]]:
        """Time until cold adapters are usable: loaded one after the other, then concurrently."""
        ratios, singles, lasts = [], [], []
        one_stages, many_stages = [], []
        for _ in range(self._options.repeats):
            alone = [await self._revision_of(next(self._cold)) for _ in range(self._options.num_single)]
            together = [await self._revision_of(next(self._cold)) for _ in range(self._options.at_once)]
            before = await self._stages()
            one = statistics.median([await self._ready_s(revision_id) for revision_id in alone])
            one_stages.append(means_ms(before, await self._stages()))
            await asyncio.sleep(2 * self._lease_s)  # or leases of the adapters to evict would be measured, too
            before = await self._stages()
            last = max(await asyncio.gather(*(self._ready_s(revision_id) for revision_id in together)))
            many_stages.append(means_ms(before, await self._stages()))
            singles.append(one)
            lasts.append(last)
            ratios.append(last / one)
            progress(
                f"  one cold adapter {1000 * one:.1f} ms, the last of {self._options.at_once} {1000 * last:.1f} ms"
            )
            yield {
                "one_cold_ms": round(1000 * statistics.median(singles), 2),
                "last_of_many_ms": round(1000 * statistics.median(lasts), 2),
                "sixteen_over_one": round(statistics.median(ratios), 3),
                "one_cold_stages_ms": _medians(one_stages),
                "many_stages_ms": _medians(many_stages),
            }

    async def _ready_s(self, revision_id: str) -> float:
        began_at = time.perf_counter()
        call = pb.EnsureAdapterRequest(revision_id=revision_id, deadline_s=_ENSURE_DEADLINE_S)
        await self._stub.EnsureAdapter(call, timeout=_ENSURE_DEADLINE_S + ANSWER_MARGIN_S)
        return time.perf_counter() - began_at

    async def _stages(self) -> Stages:
        return await stages_at(self._session, _WORKER, f"{self._agent_url}/metrics", _STAGES)

    async def _revision_of(self, number: int) -> str:
        async with self._session.get(f"{self._url}/v1/models/{_name(number)}") as answer:
            return (await answer.json())["root"]

    async def throughput(self, progress: Callable[[str], None]) -> AsyncIterator[dict[str, Any]]:
        """Throughput with as many adapters as fit in host memory, and with several times as many, always cold."""
        options = self._options
        few = [next(self._cold) for _ in range(options.budget)]
        many = few + [next(self._cold) for _ in range(options.budget * (options.overcommit - 1))]
        measured: dict[int, list[float]] = {len(few): [], len(many): []}
        for _ in range(options.repeats):
            for adapters in (few, many):
                for _ in range(2):  # puts all on the worker's disk, and the few back in memory
                    await self._requests_per_s(adapters, len(adapters))
                measured[len(adapters)].append(await self._requests_per_s(adapters, options.num_requests))
                progress(f"  {len(adapters)} adapters in turn: {measured[len(adapters)][-1]:.2f} requests/s")
            resident, overcommitted = measured.values()
            ratios = [over / all_resident for over, all_resident in zip(overcommitted, resident, strict=True)]
            yield {
                "all_resident_requests_per_s": round(statistics.median(resident), 3),
                "overcommit_requests_per_s": round(statistics.median(overcommitted), 3),
                "overcommit_throughput_ratio": round(statistics.median(ratios), 3),
            }

    async def _requests_per_s(self, adapters: Sequence[int], count: int) -> float:
        prompts = self._prompts()
        sessions = (self._session_of(prompts, number, adapters[number % len(adapters)]) for number in range(count))
        return requests_per_s(await closed_load(self._endpoint, sessions, self._options.concurrency))

    def _prompts(self) -> Stream:
        """Prompts that nothing else has."""
        return Stream(Workload("cold-load", "", "", vocabulary=_VOCABULARY), next(self._seeds), 0)

    def _session_of(self, prompts: Stream, number: int, adapter: int) -> Session:
        request = prompts.completion(number, self._options.prompt_tokens, self._options.generated_tokens)
        return Session(number, adapter, (request,))

    async def first_tokens(
        self, requests_per_s: float, progress: Callable[[str], None]
    ) -> AsyncIterator[dict[str, Any]]:
        """Residents' TTFT while cold adapters arrive, relative to arrivals of resident ones."""
        options = self._options
        residents = [next(self._cold) for _ in range(options.num_resident)]
        await self._requests_per_s(residents, 2 * options.num_resident)
        gap_s = 1 / (options.use * requests_per_s)
        baselines, with_cold, ratios = [], [], []
        for _ in range(options.repeats):
            warm = [residents[number % len(residents)] for number in range(options.num_cold)]
            baselines.append(await self._watch(residents, warm, gap_s))
            with_cold.append(await self._watch(residents, [next(self._cold) for _ in range(options.num_cold)], gap_s))
            ratios.append(with_cold[-1] / baselines[-1])
            progress(
                f"  residents' p95 TTFT {1000 * baselines[-1]:.1f} ms, with cold arrivals {1000 * with_cold[-1]:.1f} ms"
            )
            yield {
                "resident_first_token_p95_ms": round(1000 * statistics.median(baselines), 2),
                "resident_first_token_p95_with_cold_ms": round(1000 * statistics.median(with_cold), 2),
                "resident_first_token_p95_ratio": round(statistics.median(ratios), 3),
            }

    async def _watch(self, residents: Sequence[int], others: Sequence[int], gap_s: float) -> float:
        """The residents' p95 TTFT in seconds, with a request every `gap_s`, some of them for `others`."""
        prompts, in_turn = self._prompts(), self._options.requests_per_cold + 1
        due, watched = [], set()
        for number in range(len(others) * in_turn):
            is_other = number % in_turn == in_turn - 1
            adapter = others[number // in_turn] if is_other else residents[number % len(residents)]
            due.append((self._session_of(prompts, number, adapter), number * gap_s))
            if not is_other:
                watched.add(number)
        records = await open_load(self._endpoint, due)
        return quantile((each.ttft_s for each in records if each.session in watched), 0.95)


def _medians(repeats: Sequence[dict[str, float]]) -> dict[str, float]:
    """By stage, without those that are off a load's path."""
    stages = dict.fromkeys(stage for each in repeats for stage in each if stage != "disk_write")
    return {stage: round(statistics.median(each[stage] for each in repeats if stage in each), 2) for stage in stages}
