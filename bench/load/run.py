"""`prelude bench load`: from a request to run a load to its figures and files."""

import asyncio
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec
import uvloop

from bench.errors import BenchError, OptionInvalid
from bench.load.client import ask_models
from bench.load.document import document, generator_of, sweep_document
from bench.load.generator import Outcome, generate, processes_for
from bench.load.options import Load
from bench.load.summary import summary
from bench.load.sweep import Ended, Found, Probe, Sweep, search, verdict
from bench.load.terminal import ProgressLine, busy_warning, phase_line, table
from bench.measuring.output import require_folder, write_json

T = TypeVar("T")

# How servers name adapters, by what /v1/models says in `owned_by`.
_FIELDS_BY_SERVER = {"prelude": "adapter", "sglang": "lora_path", "vllm": "model"}
_WARM_UP_SEED = 1_000_003  # added to the load's
_SHOWN = 8  # adapters by name
_PROBE_SEED = 10_007  # likewise, for each probe of a sweep: prompts that no cache has seen


async def resolved(load: Load) -> Load:
    """The load with what only the endpoint knows: its model, and how it names adapters. Raises BenchError."""
    endpoint = load.endpoint
    count = len(endpoint.adapters) if endpoint.takes_served and endpoint.adapter_field != "none" else 0
    if count or not endpoint.model or not endpoint.adapter_field:
        served = await ask_models(endpoint.url, endpoint.headers, count)
        field = endpoint.adapter_field or _FIELDS_BY_SERVER.get(served.server, "adapter")
        if len(served.adapters) < count:
            raise BenchError(
                f"{count} adapters are asked for, but {endpoint.url} lists {len(served.adapters)}; ask for fewer with "
                "--adapters, or name those that it has"
            )
        names = served.adapters[:count] or endpoint.adapters
        endpoint = msgspec.structs.replace(
            endpoint, model=endpoint.model or served.model, adapter_field=field, adapters=names
        )
    return msgspec.structs.replace(load, endpoint=endpoint)


async def measure(load: Load, num_warm_up: int, out: TextIO) -> Outcome:
    """Warm up, then run the load. Raises BenchError, or Ended after Ctrl-C in the warm-up: nothing was measured."""
    if num_warm_up:
        print(f"warming up with {num_warm_up} requests", file=out, flush=True)
        if (await generate(warm_up_of(load, num_warm_up))).is_stopped:
            raise Ended("stopped by Ctrl-C in the warm-up, before anything was measured")
    return await generate(load, ProgressLine(out, load.num_requests))


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
    json_path: Path | None,
    command: str,
) -> dict[str, Any]:
    """Run the load, print its figures, write the file; returns its content. Raises BenchError."""
    out = sys.stdout
    require_folder(json_path)

    async def main() -> tuple[Load, Outcome]:
        ready = await resolved(load)
        if not ready.processes:
            ready = msgspec.structs.replace(ready, processes=processes_for(ready))
        print(introduction(ready), file=out, flush=True)
        return ready, await measure(ready, num_warm_up, out)

    ready, outcome = _run(main())
    found = document(ready, outcome, command, slo_ms)
    if outcome.is_stopped:
        print("stopped before its end by Ctrl-C", file=out)
    for phase in found.get("phases", ()):
        print(phase_line(phase), file=out)
    print(table(found["summary"]) + busy_warning(found["generator"]), file=out, flush=True)
    write_json(found, json_path)
    return found


def run_sweep(
    load: Load,
    sweep: Sweep,
    *,
    num_warm_up: int,
    slo_ms: dict[str, float],
    json_path: Path | None,
    command: str,
) -> Found:
    """Find the highest rate that holds the objectives, print and write every rate that was tried. Raises BenchError."""
    out = sys.stdout
    require_folder(json_path)
    sweep.check()
    if not slo_ms:
        raise OptionInvalid("--sweep needs objectives to hold: --goodput ttft:500 tpot:50, say")
    if load.num_requests is not None:
        raise OptionInvalid(
            "--num-requests with --sweep: the higher the rate, the shorter would be the load; --duration-s"
        )
    if load.concurrency is not None:
        raise OptionInvalid("--concurrency with --sweep: its loads are open loops, which have no limit")

    tried: list[Tried] = []

    async def main() -> Found:
        return await find_highest_rate(await resolved(load), sweep, num_warm_up, slo_ms, out, tried)

    found = _run(main())
    print(f"{load.workload.name}: {verdict(found)}", file=out, flush=True)
    content = sweep_document(tried[-1].load, tried[-1].outcome, found, command, slo_ms)
    write_json(content, json_path)
    return found


@dataclass(frozen=True, slots=True)
class Tried:
    """A rate, and what came of it under whatever objectives."""

    rate: float
    duration_s: float
    load: Load
    outcome: Outcome

    def probe(self, slo_ms: dict[str, float]) -> Probe:
        """How it is under these objectives."""
        records = self.outcome.records
        figures = summary(records, slo_ms)
        return Probe(self.rate, figures["goodput"]["share"], figures, round(len(records) / self.duration_s, 4))


async def find_highest_rate(
    load: Load, sweep: Sweep, num_warm_up: int, slo_ms: dict[str, float], out: TextIO, tried: list[Tried]
) -> Found:
    """What the sweep found. Raises BenchError.

    It starts from what was `tried`, for other objectives, and adds to it; it warms up before the first.
    """

    async def probe(rate: float) -> Probe:
        duration_s = load.duration_s or sweep.probe_s(rate)
        this = msgspec.structs.replace(
            load, requests_per_s=rate, seed=load.seed + _PROBE_SEED * len(tried), duration_s=duration_s
        )
        if not load.processes:
            this = msgspec.structs.replace(this, processes=processes_for(this))
        print(introduction(this), file=out, flush=True)
        outcome = await measure(this, 0 if tried else num_warm_up, out)
        if outcome.is_stopped:
            raise Ended("stopped by Ctrl-C before the highest rate was found")
        if (count := len(outcome.records)) < sweep.min_requests:
            raise Ended(
                f"{rate:.4g} requests/s made {count} requests in {duration_s:g} s, too few to judge it by a "
                f"share of {sweep.share:g}: {sweep.min_requests} are needed; give a longer --duration-s"
            )
        tried.append(Tried(rate, duration_s, this, outcome))
        found = tried[-1].probe(slo_ms)
        told = f"{found.came_per_s:.4g} came, {found.summary['requests_per_s']:.4g} were answered"
        warning = busy_warning(generator_of(outcome))
        print(
            f"  {rate:.4g} requests/s ({told}): {found.share:.1%} within the objectives{warning}", file=out, flush=True
        )
        return found

    return await search(sweep, probe, [each.probe(slo_ms) for each in tried])


def _run(main: Coroutine[Any, Any, T]) -> T:
    try:
        return uvloop.run(main)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None  # the second Ctrl-C


def introduction(load: Load) -> str:
    """A line about what is sent."""
    endpoint, workload = load.endpoint, load.workload
    pace = f"{load.concurrency} at a time"
    if load.is_open:
        pace = f"{load.requests_per_s:g} requests/s"
    more = f" and {len(endpoint.adapters) - _SHOWN} more" if len(endpoint.adapters) > _SHOWN else ""
    names = (
        f"{len(endpoint.adapters)} adapters ({workload.popularity}; field `{endpoint.adapter_field}`): "
        f"{', '.join(endpoint.adapters[:_SHOWN])}{more}"
    )
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
