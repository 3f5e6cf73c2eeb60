"""`prelude bench load`: from a request to run a load to its figures and files."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec
import uvloop

from bench.errors import BenchError
from bench.load.client import ask_models
from bench.load.document import document, generator_of, read, sweep_document
from bench.load.generator import Outcome, generate, processes_for
from bench.load.options import ADAPTER_FIELDS, Load
from bench.load.report.compare import Ratio, compare, differences, failures
from bench.load.report.compare import table as table_of_ratios
from bench.load.report.page import load_page
from bench.load.report.terminal import LiveLine, busy_warning, table
from bench.load.summary import SLO_KEYS, summary, ttft_ms_quarters
from bench.load.sweep import Ended, Found, Probe, Sweep, search, verdict
from bench.measuring.output import require_folders, write_json, write_text

T = TypeVar("T")

# How servers name adapters, by what /v1/models says in `owned_by`.
_FIELDS_BY_SERVER = {"prelude": "adapter", "sglang": "lora_path", "vllm": "model"}
_WARM_UP_SEED = 1_000_003  # added to the load's
_PROBE_SEED = 10_007  # likewise, for each probe of a sweep: prompts that no cache has seen


@dataclass(frozen=True, slots=True)
class Files:
    """What is written at the end."""

    json: Path | None = None
    html: Path | None = None

    def check(self) -> None:
        """Raises BenchError before anything is measured."""
        require_folders(self.json, self.html)


async def resolved(load: Load, ready_timeout_s: float) -> Load:
    """The load with what only the endpoint knows: its model, and how it names adapters. Raises BenchError."""
    endpoint = load.endpoint
    if not endpoint.model or not endpoint.adapter_field or ready_timeout_s:
        served = await ask_models(endpoint.url, endpoint.headers, ready_timeout_s, endpoint.model)
        field = endpoint.adapter_field or _FIELDS_BY_SERVER.get(served.server, "adapter")
        endpoint = msgspec.structs.replace(endpoint, model=endpoint.model or served.model, adapter_field=field)
    if endpoint.adapter_field not in ADAPTER_FIELDS:
        raise BenchError(f"--adapter-field {endpoint.adapter_field}: there are {', '.join(ADAPTER_FIELDS)}")
    return msgspec.structs.replace(load, endpoint=endpoint)


async def measure(load: Load, num_warm_up: int, out: TextIO) -> Outcome:
    """Warm up, then run the load. Raises BenchError, or Ended after Ctrl-C in the warm-up: nothing was measured."""
    if num_warm_up:
        print(f"warming up with {num_warm_up} requests", file=out, flush=True)
        if (await generate(warm_up_of(load, num_warm_up))).is_stopped:
            raise Ended("stopped by Ctrl-C in the warm-up, before anything was measured")
    line = LiveLine(out, load.num_requests)
    try:
        return await generate(load, line)
    finally:
        line.end()


def warm_up_of(load: Load, count: int) -> Load:
    """The warm-up: `count` requests of the same shape from another seed, in a closed loop."""
    return msgspec.structs.replace(
        load,
        seed=load.seed + _WARM_UP_SEED,
        num_requests=count,
        duration_s=None,
        requests_per_s=None,
        concurrency=load.concurrency or load.workload.concurrency or 8,
        processes=1,
    )


def run(
    load: Load,
    *,
    num_warm_up: int,
    slo_ms: dict[str, float],
    files: Files,
    command: str,
    ready_timeout_s: float = 0.0,
    out: TextIO | None = None,
) -> dict[str, Any]:
    """Run the load, print its figures, write the files; returns the JSON's content. Raises BenchError."""
    out = out or sys.stdout
    files.check()
    if unknown := set(slo_ms) - set(SLO_KEYS):
        raise BenchError(f"--goodput {', '.join(sorted(unknown))}: there are {', '.join(SLO_KEYS)}")

    async def main() -> tuple[Load, Outcome]:
        ready = await resolved(load, ready_timeout_s)
        if not ready.processes:
            ready = msgspec.structs.replace(ready, processes=processes_for(ready))
        print(introduction(ready), file=out, flush=True)
        return ready, await measure(ready, num_warm_up, out)

    ready, outcome = _run(main())
    found = document(ready, outcome, command, slo_ms)
    if outcome.is_stopped:
        print("stopped before its end by Ctrl-C", file=out)
    print(table(found["summary"]) + busy_warning(found["generator"]), file=out, flush=True)
    write(found, outcome, files)
    return found


def run_sweep(
    load: Load,
    sweep: Sweep,
    *,
    num_warm_up: int,
    slo_ms: dict[str, float],
    files: Files,
    command: str,
    ready_timeout_s: float = 0.0,
    out: TextIO | None = None,
) -> Found:
    """Find the highest rate that holds the objectives, print and write every rate that was tried. Raises BenchError."""
    out = out or sys.stdout
    files.check()
    sweep.check()
    if not slo_ms:
        raise BenchError("--sweep needs objectives to hold: --goodput ttft:500 tpot:50, say")
    if files.html is not None:
        raise BenchError("--html is the page of one load; a sweep writes --json")
    if load.num_requests is not None:
        raise BenchError(
            "--num-requests with --sweep: the higher the rate, the shorter would be the load; --duration-s"
        )

    async def main() -> tuple[Found, Load, Outcome]:
        return await find_highest_rate(await resolved(load, ready_timeout_s), sweep, num_warm_up, slo_ms, out)

    found, last, outcome = _run(main())
    print(f"{load.workload.name}: {verdict(found)}", file=out, flush=True)
    content = sweep_document(last, outcome, found, command, slo_ms)
    if files.json is not None:
        write_json(content, files.json)
    return found


async def find_highest_rate(
    load: Load, sweep: Sweep, num_warm_up: int, slo_ms: dict[str, float], out: TextIO
) -> tuple[Found, Load, Outcome]:
    """What the sweep found, and its last load with its outcome; it warms up before the first. Raises BenchError."""
    loads: list[tuple[Load, Outcome]] = []
    num_probes = 0

    async def probe(rate: float) -> Probe:
        nonlocal num_probes
        duration_s = load.duration_s or sweep.probe_s(rate)
        tried = msgspec.structs.replace(
            load, requests_per_s=rate, seed=load.seed + _PROBE_SEED * num_probes, duration_s=duration_s
        )
        if not load.processes:
            tried = msgspec.structs.replace(tried, processes=processes_for(tried))
        print(introduction(tried), file=out, flush=True)
        outcome = await measure(tried, 0 if num_probes else num_warm_up, out)
        num_probes += 1
        if outcome.is_stopped:
            raise Ended("stopped by Ctrl-C before the highest rate was found")
        if (count := len(outcome.records)) < sweep.min_requests:
            raise Ended(
                f"{rate:.4g} requests/s made {count} requests in {duration_s:g} s, too few to judge it by "
                f"--sweep-share {sweep.share:g}: {sweep.min_requests} are needed; give a longer --duration-s"
            )
        loads[:] = [(tried, outcome)]
        figures = summary(outcome.records, slo_ms)
        share = figures["goodput"]["share"]
        warning = busy_warning(generator_of(outcome))
        came, quarters = round(count / duration_s, 4), ttft_ms_quarters(outcome.records, duration_s)
        told = f"{came:.4g} came, {figures['requests_per_s']:.4g} were answered"
        print(f"  {rate:.4g} requests/s ({told}): {share:.1%} within the objectives{warning}", file=out, flush=True)
        return Probe(rate, share, figures, came, quarters, tried.workload.conversation is not None)

    found = await search(sweep, probe)
    return found, *loads[0]


def _run(main: Coroutine[Any, Any, T]) -> T:
    try:
        return uvloop.run(main)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None  # the second Ctrl-C


def run_compare(paths: tuple[Path, Path], out: TextIO | None = None) -> list[Ratio]:
    """Print the ratios of two files that `--json` wrote. Raises BenchError."""
    out = out or sys.stdout
    (of_a, records_a), (of_b, records_b) = (read(path) for path in paths)
    objectives = [each["summary"].get("slo_ms") or {} for each in (of_a, of_b)]
    slo_ms = objectives[0] or objectives[1]
    ratios = compare(records_a, records_b, slo_ms)
    notes = [failures(records_a, records_b)]
    if slo_ms:
        limits = ", ".join(f"{key} {limit:g} ms" for key, limit in slo_ms.items())
        others = ", the objectives of A; B was measured with others" if objectives[1] not in ({}, slo_ms) else ""
        notes.append(f"goodput of both is under {limits}{others}")
    notes += [f"they differ in {each}" for each in differences(of_a, of_b)]
    for note in notes:
        print(note, file=out)
    print(table_of_ratios(ratios), file=out)
    return ratios


def write(found: dict[str, Any], outcome: Outcome, files: Files) -> None:
    """Write what was asked for, first the file that has everything. Raises BenchError."""
    write_json(found, files.json)
    if files.html is not None:
        write_text(load_page(found, outcome.records), files.html)


def introduction(load: Load) -> str:
    """A line about what is sent."""
    endpoint, workload = load.endpoint, load.workload
    pace = f"{load.concurrency} at a time"
    if load.is_open:
        pace = f"{load.requests_per_s:g} requests/s ({load.arrivals})"
    names = f"{len(endpoint.adapters)} adapters ({workload.popularity.distribution}, field `{endpoint.adapter_field}`)"
    is_new = load.num_requests is not None and load.num_requests <= len(endpoint.adapters)
    if workload.popularity.distribution == "distinct" and not is_new:
        names += ", each again when all have come"
    limits = []
    if load.num_requests is not None:
        limits.append(f"{load.num_requests} requests")
    if load.duration_s is not None:
        limits.append(f"{load.duration_s:g} s")
    return (
        f"workload {workload.name}, seed {load.seed}: {pace}, {' and '.join(limits) or 'all of it'}; "
        f"model {endpoint.model}, {names if endpoint.adapters else 'no adapters'}; "
        f"processes of the generator: {load.processes}"
    )
