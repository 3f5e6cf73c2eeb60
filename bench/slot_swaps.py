"""Benchmark with more adapters than slots: the cost of swapping adapters into the slots of prefill batches.

One engine, every adapter resident in host memory. Loads with as many adapters as slots, where no slot changes, and
with more, taken in turn, so that under LRU every request finds its adapter in no slot: the worst case. The loads take
turns, every second time in reverse order, so that drift of the machine's speed affects all alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from adapters.model.base_model import MODULES, BaseModel
from bench.errors import BenchError
from bench.load.options import Endpoint
from bench.load.record import Record
from bench.load.strict import closed_load, requests_per_s
from bench.measuring import provenance
from bench.measuring.output import growing_json, require_folders
from bench.measuring.quantile import quantile
from bench.measuring.stage_times import stages_at
from bench.options import DTYPE, Shape
from bench.options import Options as EngineOptions
from bench.systems.adapter_set import adapters_folder, prepare_adapters
from bench.systems.engines import engine_spec, load_adapters, running_engine
from bench.systems.models import write_model
from bench.workloads.lengths import FixedLengths
from bench.workloads.workload import Stream, Workload
from engine.arguments import AdapterSlots

_REQUEST_TIMEOUT_S = 300.0
_STEPS = "prelude_engine_adapter_step_seconds"


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    slots: int = 8
    adapters: tuple[int, ...] = (8, 32)  # numbers of adapters in use
    repeats: int = 3
    prompt_tokens: int = 128
    generated_tokens: int = 16
    concurrency: int = 8
    num_requests: int = 96  # per load
    model: str = "tiny"  # a key of bench.systems.models.MODELS
    lora_rank: int = 16
    device: str = "cpu"
    engine_arguments: tuple[str, ...] = ()


QUICK = Options(repeats=1, num_requests=16, slots=2, adapters=(2, 4), concurrency=4)


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> None:
    """Measure, print a line per load and the ratios, write the numbers. Raises BenchError."""
    require_folders(json_path)
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        **provenance.head("slots", command, asdict(options), options.device),
        "rows": rows,
        "medians": [],
    }
    with growing_json(document, json_path, "after all loads") as write:

        def add(row: dict[str, Any]) -> None:
            rows.append(row)
            measured = {each["adapters"] for each in rows}
            document["medians"] = [_median(rows, count) for count in options.adapters if count in measured]
            write()

        with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
            asyncio.run(_measure_all(options, Path(folder), add, progress))
    for each in document["medians"]:
        progress(
            "n = {adapters:<4} {requests_per_s:7.2f} requests/s, TTFT p50 {first_token_p50_ms} p95 "
            "{first_token_p95_ms} ms, {fills} fills of {fill_ms} ms".format(**each)
        )


def _median(rows: list[dict[str, Any]], adapters: int) -> dict[str, Any]:
    chosen = [row for row in rows if row["adapters"] == adapters]
    return {
        name: adapters if name == "adapters" else round(statistics.median(row[name] for row in chosen), 2)
        for name in chosen[0]
        if name != "repeat"
    }


async def _measure_all(
    options: Options, folder: Path, add: Callable[[dict[str, Any]], None], progress: Callable[[str], None]
) -> None:
    most = max(options.adapters)
    if most < 1 or options.slots < 1:
        raise BenchError(f"slots is {options.slots} and adapters {options.adapters}; both must be positive")
    progress("Creating the model and the adapters.")
    await asyncio.to_thread(write_model, options.model, folder / "model", options.device, options.engine_arguments)
    base = BaseModel.read(folder / "model")
    slots = AdapterSlots(options.slots, options.lora_rank, MODULES)
    spec = engine_spec("unified", folder / "model", slots, _engine_options(options), folder / "engine")
    async with contextlib.AsyncExitStack() as stack:
        kept = stack.enter_context(adapters_folder(options.device, folder))
        adapters = await asyncio.to_thread(
            prepare_adapters, "lora", options.lora_rank, most, base, DTYPE, kept, frozenset({"serving"})
        )
        progress("Starting the engine.")
        timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))
        await stack.enter_async_context(running_engine(spec))
        progress("Loading the adapters.")
        await load_adapters(spec, {each.revision_id: each.serving for each in adapters})
        revisions = [each.revision_id for each in adapters]
        for repeat in range(options.repeats):
            for count in reversed(options.adapters) if repeat % 2 else options.adapters:
                row = await _measure(session, spec.url, revisions, count, repeat, options, base.vocabulary)
                add(row)
                progress("  repeat {repeat}  n = {adapters:<4} {requests_per_s:7.2f} requests/s".format(**row))


def _engine_options(options: Options) -> EngineOptions:
    shape = Shape(options.prompt_tokens, options.generated_tokens, options.concurrency, options.num_requests)
    return EngineOptions(
        ("unified_lora",), options.adapters, options.repeats, shape, options.slots, "engines",
        device=options.device, engine_arguments=options.engine_arguments,
    )  # fmt: skip


async def _measure(
    session: aiohttp.ClientSession,
    url: str,
    revisions: list[str],
    count: int,
    repeat: int,
    options: Options,
    vocabulary: int,
) -> dict[str, Any]:
    """One load over `count` adapters, after a warm-up of the same shape."""
    lengths = FixedLengths(options.prompt_tokens, options.generated_tokens)
    workload = Workload("slots", "", "", lengths=lengths, vocabulary=vocabulary)  # adapters in turn
    endpoint = Endpoint(url, "bench", tuple(revisions), "lora_path")

    async def load(kind: int, num_requests: int) -> list[Record]:
        seed = (kind * 1_000_000 + repeat) * 1_000_000 + count  # no two loads have a prompt in common
        sessions = Stream(workload, seed, count).sessions(num_requests)
        return await closed_load(endpoint, sessions, options.concurrency)

    await load(0, max(options.concurrency, options.slots))
    seconds_before, fills_before = await _fills(session, url)
    records = await load(1, options.num_requests)
    first_tokens_s = [each.ttft_s for each in records]
    seconds, fills = await _fills(session, url)
    fills, seconds = fills - fills_before, seconds - seconds_before
    return {
        "adapters": count,
        "repeat": repeat,
        "requests_per_s": round(requests_per_s(records), 3),
        "first_token_p50_ms": round(1000 * quantile(first_tokens_s, 0.5), 1),
        "first_token_p95_ms": round(1000 * quantile(first_tokens_s, 0.95), 1),
        "fills": int(fills),
        "fill_ms": round(1000 * seconds / fills, 2) if fills else 0.0,  # until the GPU's work is enqueued
    }


async def _fills(session: aiohttp.ClientSession, url: str) -> tuple[float, float]:
    """Seconds and number of slot fills so far."""
    steps = await stages_at(session, "the engine", f"{url}/metrics", _STEPS, "step")
    return steps.get("fill", (0.0, 0.0))
