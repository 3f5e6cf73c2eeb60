"""Benchmark of the cost of adapters: requests/s over the number of adapters in use, for Prelude and stock SGLang.

Every engine starts once and stays up; idle ones sleep. In each repeat and for each number of adapters every system
gets the same requests, one system after the other. Every second repeat runs in reverse order, so that drift of the
machine's speed affects all systems alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.errors import BenchError, WrongAnswer
from bench.load.record import Record
from bench.load.strict import closed, stopwatch
from bench.load.summary import duration_s
from bench.measuring import provenance, report
from bench.measuring.contention import cpu_use, foreign_cores
from bench.measuring.output import growing_json, require_folders
from bench.measuring.quantile import quantile
from bench.options import DTYPE, Options, Shape
from bench.systems.models import MODELS, engines_read_weights, require_loadable
from bench.systems.start import MIXED, Starter
from bench.systems.systems import HAVE_BASELINE, Request, System
from bench.workloads import session as sessions
from bench.workloads.lengths import FixedLengths
from bench.workloads.workload import Stream, Workload

_MAX_CACHED_SHARE = 0.02  # of prompt tokens: random prompts may share a prefix by chance
_CHECK_TOKENS = 4
_CHECK_SEED, _WARM_UP_SEED, _LOAD_SEED = 0, 1, 2
_MIX_SEEDS = 100  # seeds of each mix, one per repeat


def run(
    options: Options, command: str, json_path: Path | None, plot_path: Path | None, progress: Callable[[str], None]
) -> None:
    """Measure, print the table, write the files. The JSON grows with each load, and says until the last that it ended
    early. Raises BenchError."""
    require_loadable(options.systems, options.engine_arguments)
    _require_shares(options)
    require_folders(json_path, plot_path)
    if plot_path is not None:
        report.require_plotting()
    settings = {
        **asdict(options),
        "model_sizes": {
            "hidden": MODELS[options.model].hidden,
            "num_layers": MODELS[options.model].num_layers,
            **(MODELS[options.model].config or {}),
            "dtype": DTYPE,
            "weights": "random" if engines_read_weights(options.engine_arguments) else "dummy",
        },
        "omp_num_threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
    }
    facts = provenance.head("adapter-tax", command, settings, options.device)
    measurements: list[report.Measurement] = []
    ratios = report.RATIOS[options.device]
    document = report.document(measurements, ratios, **facts)

    def publish() -> None:
        progress("\n" + report.table(measurements, ratios, _footnotes(options)))
        if plot_path is not None:
            report.draw(measurements, _title(options), plot_path)

    with growing_json(document, json_path, "after all loads") as write:

        def add(measured: report.Measurement) -> None:
            measurements.append(measured)
            document.update(report.document(measurements, ratios))
            write()

        with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
            try:
                asyncio.run(_measure_all(options, Path(folder), progress, add, publish))
            except asyncio.CancelledError:
                raise BenchError("stopped before all measurements were done") from None


async def _measure_all(
    options: Options,
    folder: Path,
    progress: Callable[[str], None],
    add: Callable[[report.Measurement], None],
    publish: Callable[[], None],
) -> None:
    task = asyncio.current_task()
    assert task is not None
    # SIGTERM acts as Ctrl-C: the engines are stopped in order, which removes their shared memory.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with contextlib.AsyncExitStack() as stack:
        base, systems = await Starter(options, folder, stack).start_all(progress)
        count, shape = max(options.adapters), options.shape
        for system in systems:
            num_loaded = 2 * count if system.name == MIXED and options.all_shares else count
            await check_that_adapters_act(system, num_loaded, shape, base.vocabulary)
        progress("Every adapter gives its own answer on every system.")
        loads = [
            (adapters, system, share)
            for adapters in sorted({0, *options.adapters})
            for system in systems
            if adapters or system.name in HAVE_BASELINE
            for share in ((system.name == MIXED and options.all_shares) or (0.0,))
        ]
        for repeat in range(options.repeats):
            for adapters, system, share in reversed(loads) if repeat % 2 else loads:
                mix = _Mix(adapters, count, share)
                measured = await _measure(system, mix, repeat, options.shape, base.vocabulary)
                add(measured)
                progress(
                    f"  repeat {repeat + 1}/{options.repeats}  n = {adapters:<3} {measured.system:<17}"
                    f"{measured.requests_per_s:7.1f} requests/s"
                    f"{1000 * measured.median_latency_s / shape.generated_tokens:8.1f} ms per generated token"
                )
        publish()  # before the engines are stopped, which can take a minute


@dataclass(frozen=True, slots=True)
class _Mix:
    """The adapters of a load, of which some are those for all positions."""

    adapters: int  # in use, in turn
    num_prepared: int  # for each of the positions
    all_share: float

    def served(self, adapter: int | None) -> int | None:
        """The number of an adapter at the system: those for all positions, evenly spread, come behind the others."""
        num_all = round(self.adapters * self.all_share)
        if adapter is None or (adapter + 1) * num_all // self.adapters == adapter * num_all // self.adapters:
            return adapter
        return self.num_prepared + adapter


def _require_shares(options: Options) -> None:
    """Raises BenchError for shares that no number of adapters makes, or that no system has."""
    if options.all_shares and MIXED not in options.systems:
        raise BenchError(f"--all-shares is about {MIXED}, which --systems leaves out")
    for share in options.all_shares:
        for adapters in options.adapters:
            if abs(adapters * share - round(adapters * share)) > 1e-6:
                raise BenchError(f"--all-shares {share:g}: of {adapters} adapters that is {adapters * share:g}")


async def _measure(system: System, mix: _Mix, repeat: int, shape: Shape, vocabulary: int) -> report.Measurement:
    varied = repeat + _MIX_SEEDS * round(1000 * mix.all_share)  # the cache has the other mixes' prompts
    await _load(system, (_WARM_UP_SEED, varied, mix.adapters), shape.concurrency, mix, shape, vocabulary)
    before = cpu_use()
    records = await _load(system, (_LOAD_SEED, varied, mix.adapters), shape.num_requests, mix, shape, vocabulary)
    seconds = duration_s(records)
    foreign = foreign_cores(before, cpu_use(), seconds)
    num_cached_tokens = sum(each.cached_tokens or 0 for each in records)
    if num_cached_tokens > _MAX_CACHED_SHARE * shape.num_requests * shape.prompt_tokens:
        raise WrongAnswer(
            f"{system.name} found {num_cached_tokens} prompt tokens in its prefix cache, where every prompt is new"
        )
    return report.Measurement(
        system=report.mixed(system.name, mix.all_share),
        adapters=mix.adapters,
        repeat=repeat,
        num_requests=len(records),
        duration_s=round(seconds, 4),
        median_latency_s=round(quantile((each.e2e_s for each in records), 0.5), 4),
        foreign_cores=round(foreign, 2),
        num_cached_tokens=num_cached_tokens,
    )


def _stream(seed: tuple[int, int, int], adapters: int, shape: Shape, vocabulary: int) -> Stream:
    """Adapters in turn, and prompts that no other seed has: of (kind, repeat, number of adapters)."""
    kind, repeat, count = seed
    lengths = FixedLengths(shape.prompt_tokens, shape.generated_tokens)
    workload = Workload("adapter-tax", "", "", lengths=lengths, vocabulary=vocabulary)
    return Stream(workload, (kind * 1_000_000 + repeat) * 1_000_000 + count, adapters)


async def _load(
    system: System, seed: tuple[int, int, int], num_requests: int, mix: _Mix, shape: Shape, vocabulary: int
) -> list[Record]:
    """Run a load. Answers are not streamed: what is measured is the engine."""
    now = stopwatch()

    async def send(
        request: sessions.Request, adapter: int | None, intended_s: float, session: int, turn: int
    ) -> Record:
        sent_s = now()
        answer = await system.send(Request(request.content["prompt"], mix.served(adapter)), request.max_tokens)
        return Record(
            session=session, turn=turn, intended_s=intended_s, sent_s=sent_s, end_s=now(),
            prompt_tokens=request.prompt_tokens, cached_tokens=answer.num_cached_tokens,
            output_tokens=len(answer.tokens), max_tokens=request.max_tokens,
        )  # fmt: skip

    stream = _stream(seed, mix.adapters, shape, vocabulary)
    return await closed(send, stream.sessions(num_requests), shape.concurrency, now)


async def check_that_adapters_act(system: System, count: int, shape: Shape, vocabulary: int) -> None:
    """Check that the base model and every adapter give different answers to one prompt. Raises WrongAnswer.

    A silently dropped adapter would look fast. Requests run one at a time and the answers include log-probabilities:
    without batching they are the same to the last bit unless an adapter changes them.
    """
    if system.name == "none":
        return
    prompt = _stream((_CHECK_SEED, 0, 0), 0, shape, vocabulary).session(0).requests[0].content["prompt"]
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
    if options.tensor_parallel > 1:
        notes.append(f"Each engine has {options.tensor_parallel} tensor-parallel ranks.")
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
