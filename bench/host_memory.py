"""Benchmark with more adapters than host memory: the cost of repeatedly loading adapters from the worker's disk.

A cluster behind its router, with one worker that holds adapters: unified, or the prefill worker of a pair. The adapters
are taken in turn, so that under LRU every request finds its adapter evicted: the worst case. Loads with adapters that
fit and with those that do not take turns, every second time in reverse order.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from adapters.errors import AdapterError
from adapters.model.base_model import BaseModel
from bench.errors import BenchError, SystemFailed
from bench.load.options import Endpoint
from bench.load.strict import closed_load, requests_per_s
from bench.load.summary import duration_s
from bench.measuring import provenance
from bench.measuring.output import require_folders, write_json
from bench.measuring.quantile import quantile
from bench.systems.imported_adapters import import_random_adapters
from bench.systems.models import write_model
from bench.workloads.lengths import FixedLengths
from bench.workloads.workload import Stream, Workload
from cluster.config.schema import ClusterConfig
from cluster.errors import StartError
from cluster.local.supervisor import LocalCluster, local_cluster

LAYOUTS = ("unified", "pair")
_TIMEOUT = aiohttp.ClientTimeout(total=300)
_LOADS = re.compile(r"^prelude_worker_adapter_load_seconds_count\{[^}]*\} (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    layouts: tuple[str, ...] = LAYOUTS
    adapters: int = 32
    room: int = 8  # adapters that fit in host memory
    fitting: int = 6  # adapters of the load that fits: fewer than `room`, or what running requests hold is in the way
    slots: int = 8
    rank: int = 16
    repeats: int = 3
    prompt_tokens: int = 128
    generated_tokens: int = 16
    concurrency: int = 8
    num_requests: int = 96  # per load
    model: str = "tiny"  # a key of bench.systems.models.MODELS
    device: str = "cpu"  # on "cuda" the two engines of a pair have a GPU each
    engine_arguments: tuple[str, ...] = ()


QUICK = Options(adapters=8, room=4, fitting=2, slots=4, repeats=1, num_requests=16, concurrency=4)


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print a line per load and the ratios, write the file; returns its content. Raises BenchError."""
    if not 0 < options.fitting <= options.room < options.adapters:
        raise BenchError(
            f"fitting is {options.fitting}, room {options.room} and adapters {options.adapters}; "
            "each must be at most the next, and room smaller than adapters"
        )
    if unknown := set(options.layouts) - set(LAYOUTS):
        raise BenchError(f"there is no layout {', '.join(sorted(unknown))}; there are {', '.join(LAYOUTS)}")
    require_folders(json_path)
    document: dict[str, Any] = {
        **provenance.head("host-memory", command, asdict(options), options.device),
        "rows": [],
    }

    def add(row: dict[str, Any]) -> None:  # the file grows with the run, so that a broken one leaves its numbers
        document["rows"].append(row)
        write_json(document, json_path)

    with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
        try:
            asyncio.run(_measure_all(options, Path(folder), add, progress))
        except (AdapterError, StartError) as error:
            raise SystemFailed(str(error)) from error
    document["medians"] = [each for layout in options.layouts for each in _medians(document["rows"], layout)]
    for each in document["medians"]:
        progress(
            "{layout:<8} {adapters:>4} adapters {requests_per_s:8.2f} requests/s ({ratio:.2f}), TTFT p50 "
            "{first_token_p50_ms} p95 {first_token_p95_ms} ms, {loads} loads".format(**each)
        )
    write_json(document, json_path)
    return document


def _medians(rows: list[dict[str, Any]], layout: str) -> list[dict[str, Any]]:
    """The two loads of a layout; `ratio` is the median of the repeats' requests/s over those of the load that fits."""
    own = [row for row in rows if row["layout"] == layout]
    speeds = {(row["repeat"], row["adapters"]): row["requests_per_s"] for row in own}
    few = min(row["adapters"] for row in own)
    medians = []
    for adapters in sorted({row["adapters"] for row in own}):
        chosen = [row for row in own if row["adapters"] == adapters]
        names = [name for name in chosen[0] if name not in ("layout", "adapters", "repeat")]
        ratios = [speeds[row["repeat"], adapters] / speeds[row["repeat"], few] for row in chosen]
        medians.append(
            {"layout": layout, "adapters": adapters}
            | {name: round(statistics.median(row[name] for row in chosen), 2) for name in names}
            | {"ratio": round(statistics.median(ratios), 3)}
        )
    return medians


async def _measure_all(
    options: Options, folder: Path, add: Callable[[dict[str, Any]], None], progress: Callable[[str], None]
) -> None:
    progress(f"Creating the model and {options.adapters} adapters.")
    await asyncio.to_thread(write_model, options.model, folder / "model", options.device, options.engine_arguments)
    importing = _config(options, folder, "unified", 1 << 30)
    names = [_name(number) for number in range(options.adapters)]
    num_bytes = await asyncio.to_thread(import_random_adapters, importing, names, os.cpu_count() or 1)
    vocabulary = BaseModel.read(folder / "model").vocabulary
    for layout in options.layouts:
        progress(f"Starting the cluster: {layout}.")
        config = _config(options, folder, layout, options.room * num_bytes + num_bytes // 2)
        async with contextlib.AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(local_cluster(config, folder / "logs" / layout))
            connector = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector))
            load = functools.partial(_load, session, cluster, options, vocabulary)
            await load(options.adapters, options.adapters, seed=-1)  # all to the worker's disk
            for repeat in range(options.repeats):
                counts = (options.fitting, options.adapters)
                for count in reversed(counts) if repeat % 2 else counts:
                    # The state that the load keeps.
                    await load(count, max(count, options.concurrency), seed=-2 - repeat)
                    row = await load(count, options.num_requests, seed=repeat)
                    add({"layout": layout, "adapters": count, "repeat": repeat} | row)
                    progress(
                        f"  repeat {repeat}  {count:>4} adapters {row['requests_per_s']:8.2f} requests/s, TTFT p95 "
                        f"{row['first_token_p95_ms']} ms, {row['loads']} loads"
                    )


async def _load(
    session: aiohttp.ClientSession,
    cluster: LocalCluster,
    options: Options,
    vocabulary: int,
    count: int,
    num_requests: int,
    *,
    seed: int,
) -> dict[str, Any]:
    """Requests for `count` adapters in turn."""
    lengths = FixedLengths(options.prompt_tokens, options.generated_tokens)
    workload = Workload("host-memory", "", "", lengths=lengths, vocabulary=vocabulary)  # adapters in turn
    stream = Stream(workload, count * 1_000_000 + seed + 1000, count)  # no two loads have a prompt in common
    endpoint = Endpoint(cluster.url, "bench", tuple(map(_name, range(count))))
    loads_before = await _num_loads(session, cluster)
    records = await closed_load(endpoint, stream.sessions(num_requests), options.concurrency)
    first_tokens = [each.ttft_s for each in records]
    return {
        "requests_per_s": round(requests_per_s(records), 3),
        "duration_s": round(duration_s(records), 2),
        "first_token_p50_ms": round(1000 * quantile(first_tokens, 0.5), 1),
        "first_token_p95_ms": round(1000 * quantile(first_tokens, 0.95), 1),
        "loads": await _num_loads(session, cluster) - loads_before,
    }


async def _num_loads(session: aiohttp.ClientSession, cluster: LocalCluster) -> int:
    """Adapters that the cluster's worker has loaded since it started."""
    [worker] = [each for each in cluster.config.workers.values() if each.holds_adapters]
    async with session.get(f"http://{worker.host}:{worker.metrics_port}/metrics") as answer:
        return round(sum(float(value) for value in _LOADS.findall(await answer.text())))


def _config(options: Options, folder: Path, layout: str, host_bytes: int) -> ClusterConfig:
    names = {"unified": {"unified-0": "unified"}, "pair": {"prefill-0": "prefill", "decode-0": "decode"}}[layout]
    workers: dict[str, dict[str, Any]] = {name: {"role": role} for name, role in names.items()}
    if options.device == "cuda":
        for gpu, worker in enumerate(workers.values()):
            worker["gpus"] = [gpu]
    return ClusterConfig.model_validate(
        {
            "model": {"path": folder / "model", "name": "bench", "dtype": "bfloat16"},
            "engine": {
                "device": options.device,
                "max_total_tokens": 2 * options.concurrency * (options.prompt_tokens + options.generated_tokens),
                "max_running_requests": options.concurrency,
                "chunked_prefill_tokens": 8192 if options.device == "cuda" else 2048,
                "extra_arguments": list(options.engine_arguments),
            },
            "router": {"port": 0},
            "workers": workers,
            "adapter_limits": {"max_rank": options.rank, "slots": options.slots},
            "catalog": {"url": f"sqlite:///{folder}/catalog.db"},
            "store": {"url": f"file://{folder}/store"},
            "residency": {"host_bytes": host_bytes},
        }
    )


def _name(number: int) -> str:
    return f"adapter-{number}"
