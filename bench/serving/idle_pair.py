"""Benchmark of a pair without requests: what its processes take of the cores, and what it costs the next request.

Engines that wait for KV could poll, which takes a core each, or sleep, which delays the request that wakes them up. So
both are measured: processor time by process while nothing is asked, and the time to the first token of single prompts
after a pause and without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.errors import SystemFailed
from bench.load.strict import stopwatch
from bench.measuring import provenance
from bench.measuring.output import growing_json, require_folders
from bench.measuring.quantile import quantile
from bench.serving.single_prompts import SinglePrompts, small_cluster
from bench.systems.models import write_model
from cluster.errors import StartError
from cluster.local.supervisor import local_cluster

_WARM_UP = 3
_SHOWN_CORES = 0.001


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    seconds: float = 20.0  # without requests
    requests: int = 30  # after a pause, and as many without
    pause_s: float = 0.5
    prompt_tokens: int = 512
    model: str = "tiny"  # a key of bench.systems.models.MODELS
    device: str = "cpu"
    engine_arguments: tuple[str, ...] = ()


QUICK = Options(seconds=2.0, requests=3, pause_s=0.1, prompt_tokens=64)


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print, write the file; returns its content. Raises BenchError."""
    require_folders(json_path)
    document: dict[str, Any] = provenance.head("idle", command, asdict(options), options.device)
    with (
        growing_json(document, json_path, "after all loads") as write,
        tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder,
    ):
        try:
            asyncio.run(_measure(options, Path(folder), document, progress))
        except StartError as error:
            raise SystemFailed(str(error)) from error
        write()
    for process in document["processes"]:
        progress(f"  {process['cores']:.3f} of a core  {process['name']}")
    progress(f"  {document['cores']:.3f} of a core in all, {document['scheduler_cores']:.3f} the busier scheduler")
    for name in ("after_pause", "without_pause"):
        progress(f"  first token {name.replace('_', ' ')}: p50 {document[f'first_token_{name}_p50_ms']:.1f} ms")
    return document


async def _measure(options: Options, folder: Path, document: dict[str, Any], progress: Callable[[str], None]) -> None:
    progress("Creating the model.")
    await asyncio.to_thread(write_model, options.model, folder / "model", options.device, options.engine_arguments)
    progress("Starting the pair.")
    config = small_cluster(
        folder,
        {"prefill-0": {"role": "prefill"}, "decode-0": {"role": "decode"}},  # on a GPU, both on one
        device=options.device,
        max_total_tokens=8 * options.prompt_tokens,
        engine_arguments=options.engine_arguments,
    )
    async with local_cluster(config, folder / "logs") as cluster:
        prompts = SinglePrompts(cluster.url, options.prompt_tokens, _WARM_UP + 2 * options.requests)
        await _times_ms(prompts, _WARM_UP, 0.0)  # kernels are compiled, connections made
        await asyncio.sleep(min(options.seconds, 4.0))
        processes = await _cores(options.seconds)
        document["processes"] = [each for each in processes if each["cores"] >= _SHOWN_CORES]
        document["cores"] = round(sum(each["cores"] for each in processes), 4)
        schedulers = [each["cores"] for each in processes if "scheduler" in each["name"]]
        document["scheduler_cores"] = max(schedulers, default=0.0)
        for name, pause_s in (("after_pause", options.pause_s), ("without_pause", 0.0)):
            times = await _times_ms(prompts, options.requests, pause_s)
            document[f"first_token_{name}_p50_ms"] = round(quantile(times, 0.5), 2)
            document[f"first_token_{name}_ms"] = [round(each, 2) for each in times]


async def _times_ms(prompts: SinglePrompts, count: int, pause_s: float) -> list[float]:
    times = []
    for _ in range(count):
        await asyncio.sleep(pause_s)
        times.append(await prompts.first_token_ms())
    return times


async def _cores(seconds: float) -> list[dict[str, Any]]:
    """What each process that this one has started takes of a core, the busiest first."""
    before, now = _cpu_s(), stopwatch()
    await asyncio.sleep(seconds)
    elapsed_s, after = now(), _cpu_s()
    found = [
        {"name": name, "cores": round((after[pid][1] - cpu_s) / elapsed_s, 4)}
        for pid, (name, cpu_s) in before.items()
        if pid in after
    ]
    return sorted(found, key=lambda each: -float(each["cores"]))


def _cpu_s() -> dict[int, tuple[str, float]]:
    """By pid: name and processor seconds so far."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words, times = process.cmdline(), process.cpu_times()
            role = next((word for word in words if word.endswith("-worker") or word in ("router", "engine.launch")), "")
            found[process.pid] = f"{process.name()} {role}".strip(), times.user + times.system
    return found
