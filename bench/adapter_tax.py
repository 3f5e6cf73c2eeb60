"""Benchmark of what adapters cost: requests/s over the number of adapters in use, for Prelude and for stock SGLang.

Every engine starts once and stays up; idle ones sleep. In each repeat and for each number of adapters every system
gets the same requests, one system after the other. Every second repeat runs in reverse order, so that drift of the
machine's speed affects all systems alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from bench.errors import BenchError, WrongAnswer
from bench.measuring import provenance, report
from bench.measuring.closed_loop import LoadResult, closed_loop
from bench.measuring.contention import cpu_use, foreign_cores
from bench.measuring.workload import Request, request
from bench.options import DTYPE, Options, Shape
from bench.systems.models import MODELS
from bench.systems.start import Starter
from bench.systems.systems import HAVE_BASELINE, System

_REQUEST_TIMEOUT_S = 300.0
_KEEP_ALIVE_S = 1.0  # below the servers' timeout: reusing a connection that the server just closed is an error
_MAX_CACHED_SHARE = 0.02  # of prompt tokens: random prompts may share a prefix by chance
_CHECK_TOKENS = 4
_CHECK_SEED, _WARM_UP_SEED, _LOAD_SEED = 0, 1, 2


def run(
    options: Options, command: str, json_path: Path | None, plot_path: Path | None, progress: Callable[[str], None]
) -> None:
    """Measure, print the table, write the files. Raises BenchError rather than report half a result."""
    for path in (json_path, plot_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchError(f"{path}: there is no folder {path.parent}")
    if plot_path is not None:
        report.require_plotting()
    facts = {
        "benchmark": "adapter-tax",
        "commit": provenance.commit(),
        "command": command,
        "hardware": provenance.hardware(options.device),
        "versions": provenance.versions(),
        "settings": {
            **asdict(options),
            "model_sizes": {
                "hidden": MODELS[options.model].hidden,
                "num_layers": MODELS[options.model].num_layers,
                **(MODELS[options.model].config or {}),
                "dtype": DTYPE,
                "weights": "random",
            },
            "omp_num_threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
        },
    }

    def publish(measurements: list[report.Measurement]) -> None:
        ratios = report.RATIOS[options.device]
        progress("\n" + report.table(measurements, ratios, _footnotes(options)))
        if json_path is not None:
            json_path.write_text(json.dumps(report.document(measurements, ratios, **facts), indent=2) + "\n")
        if plot_path is not None:
            report.draw(measurements, _title(options), plot_path)

    with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
        try:
            asyncio.run(_measure_all(options, Path(folder), progress, publish))
        except asyncio.CancelledError:
            raise BenchError("stopped before all measurements were done") from None


async def _measure_all(
    options: Options,
    folder: Path,
    progress: Callable[[str], None],
    publish: Callable[[list[report.Measurement]], None],
) -> None:
    measurements: list[report.Measurement] = []
    task = asyncio.current_task()
    assert task is not None
    # SIGTERM acts as Ctrl-C: the engines are stopped in order, which removes their shared memory.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with contextlib.AsyncExitStack() as stack:
        timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))
        base, systems = await Starter(options, folder, session, stack).start_all(progress)
        count, shape = max(options.adapters), options.shape
        for system in systems:
            await check_that_adapters_act(system, count, shape, base.vocabulary)
        progress("Every adapter gives its own answer on every system.")
        loads = [
            (adapters, system)
            for adapters in sorted({0, *options.adapters})
            for system in systems
            if adapters or system.name in HAVE_BASELINE
        ]
        for repeat in range(options.repeats):
            for adapters, system in reversed(loads) if repeat % 2 else loads:
                measured = await _measure(system, adapters, repeat, options.shape, base.vocabulary)
                measurements.append(measured)
                progress(
                    f"  repeat {repeat + 1}/{options.repeats}  n = {adapters:<3} {system.name:<15}"
                    f"{measured.requests_per_s:7.1f} requests/s"
                )
        publish(measurements)  # before the engines are stopped, which can take a minute


async def _measure(system: System, adapters: int, repeat: int, shape: Shape, vocabulary: int) -> report.Measurement:
    warm_up = shape.concurrency
    await _load(system, (_WARM_UP_SEED, repeat, adapters), warm_up, adapters, shape, vocabulary)
    seed = (_LOAD_SEED, repeat, adapters)
    before = cpu_use()
    result, num_cached_tokens = await _load(system, seed, shape.num_requests, adapters, shape, vocabulary)
    foreign = foreign_cores(before, cpu_use(), result.duration_s)
    if num_cached_tokens > _MAX_CACHED_SHARE * shape.num_requests * shape.prompt_tokens:
        raise WrongAnswer(
            f"{system.name} found {num_cached_tokens} prompt tokens in its prefix cache, where every prompt is new"
        )
    return report.Measurement(
        system=system.name,
        adapters=adapters,
        repeat=repeat,
        num_requests=result.num_requests,
        duration_s=round(result.duration_s, 4),
        median_latency_s=round(result.latency_s(0.5), 4),
        foreign_cores=round(foreign, 2),
        num_cached_tokens=num_cached_tokens,
    )


async def _load(
    system: System, seed: tuple[int, ...], num_requests: int, adapters: int, shape: Shape, vocabulary: int
) -> tuple[LoadResult, int]:
    """Run a load; its result and the number of prompt tokens that came from the prefix cache."""
    requests = [request(seed, number, adapters, shape.prompt_tokens, vocabulary) for number in range(num_requests)]
    num_cached_tokens = 0

    async def send(number: int) -> None:
        nonlocal num_cached_tokens
        answer = await system.send(requests[number], shape.generated_tokens)
        num_cached_tokens += answer.num_cached_tokens

    return await closed_loop(send, num_requests, shape.concurrency), num_cached_tokens


async def check_that_adapters_act(system: System, count: int, shape: Shape, vocabulary: int) -> None:
    """Check that the base model and every adapter give different answers to one prompt. Raises WrongAnswer.

    A silently dropped adapter would look fast. Requests run one at a time and the answers include log-probabilities:
    without batching they are the same to the last bit unless an adapter changes them.
    """
    if system.name == "none":
        return
    prompt = request((_CHECK_SEED,), 0, 0, shape.prompt_tokens, vocabulary).prompt
    num_tokens = min(_CHECK_TOKENS, shape.generated_tokens)
    answers: set[tuple[Any, ...]] = set()
    for adapter in (None, *range(count)):
        answer = await system.send(Request(prompt, adapter), num_tokens, with_logprobs=True)
        if len(answer.logprobs) != num_tokens:
            raise WrongAnswer(f"{system.name}: asked for {num_tokens} log-probabilities, got {len(answer.logprobs)}")
        answers.add((answer.tokens, answer.logprobs))
    if len(answers) != count + 1:
        raise WrongAnswer(
            f"{system.name}: the base model and {count} adapters gave {len(answers)} different answers to one prompt, "
            f"not {count + 1}"
        )


def _footnotes(options: Options) -> list[str]:
    shape = options.shape
    notes = [
        f"{_model_text(options)}, random weights; LoRA of rank {options.lora_rank} on seven projections, DiReFT of "
        f"rank {options.reft_rank} on every layer; {shape.concurrency} requests at a time of {shape.prompt_tokens} + "
        f"{shape.generated_tokens} tokens, {shape.num_requests} per load; {options.num_slots} adapter slots; medians "
        f"of {options.repeats} repeats, all systems in turn, there and back.",
    ]
    if "pd" in options.systems:
        notes.append(
            "pd goes through the router, which costs the same CPU cores too."
            if options.pd_through == "router"
            else "pd is measured without a router: the load client calls its two engines itself."
        )
        notes.append("pd's two engines share the machine: compare it with itself, not with the others.")
    return notes


def _model_text(options: Options) -> str:
    model = MODELS[options.model]
    where = "a CPU" if options.device == "cpu" else provenance.gpu_name()
    return f"{options.model}: hidden {model.hidden}, {model.num_layers} layers, {DTYPE}, on {where}"


def _title(options: Options) -> str:
    shape = options.shape
    return (
        f"{_model_text(options)}\nLoRA rank {options.lora_rank}, {shape.concurrency} concurrent, "
        f"{shape.prompt_tokens}+{shape.generated_tokens} tokens, {options.num_slots} slots"
    )
