"""`prelude bench simulate --validate`: a cluster's curves, and loads on it compared with their simulation."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from adapters.errors import AdapterError
from bench.errors import BenchError, SystemFailed
from bench.load.generator import generate
from bench.load.options import Endpoint, Load
from bench.load.record import Record
from bench.measuring import provenance
from bench.measuring.contention import cpu_use, foreign_cores
from bench.measuring.output import growing_json, require_folders
from bench.measuring.quantile import quantile
from bench.simulator.curves import Curves, Limits, write_curves
from bench.simulator.outcome import Outcome
from bench.simulator.questions.search import request_s
from bench.simulator.run import simulate
from bench.simulator.scenario import Pools, Scenario
from bench.simulator.traffic import Arrival, Replay
from bench.simulator.validation.measure import Grid, Wave, measure_curves
from bench.systems.imported_adapters import import_random_adapters
from bench.systems.models import MODELS, write_model
from bench.workloads.lengths import FixedLengths
from bench.workloads.popularity import Popularity
from bench.workloads.workload import Workload
from cluster.config.schema import ClusterConfig
from cluster.errors import StartError
from cluster.local.supervisor import local_cluster

_UNTIL_STREAMING_S = 0.5  # a stream has its first token by then
_RANGE_RATIO = 0.3  # of the lengths
_SOURCE = "prelude bench simulate --validate"
_ON_CPUS = Grid()
_ON_GPUS = Grid(prompts=(32, 128, 512, 1024, 2048), batches=(1, 4, 16, 64, 128), contexts=(8, 1024), repeats=9)


@dataclass(frozen=True, slots=True)
class Options:
    """One validation."""

    model: str = "tiny"
    device: str = "cpu"
    engine_arguments: tuple[str, ...] = ()
    loads: tuple[float, ...] = (0.3, 0.6, 0.8)  # of what the curves say that a worker can do at most
    seconds: float = 30.0  # of each load
    prompt_tokens: int = 192  # at most; uniform from 0.3 of it
    output_tokens: int = 32
    num_adapters: int = 12  # of the loads, cold at first
    rank: int = 16
    slots: int = 8
    grid: Grid = _ON_CPUS
    seed: int = 1


QUICK = Options(
    loads=(0.5,),
    seconds=5.0,
    grid=Grid(prompts=(16, 128), batches=(1, 4), contexts=(8, 128), num_tokens=12, repeats=2, num_cold=2),
)


def run(
    options: Options, command: str, json_path: Path | None, curves_path: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure, simulate, print and write the errors; returns the file's content. Raises BenchError."""
    require_folders(json_path, curves_path)
    if options.model not in MODELS:
        raise BenchError(f"--model {options.model}: there are {', '.join(MODELS)}")
    if options.device == "cuda" and options.grid is _ON_CPUS:
        options = replace(options, grid=_ON_GPUS, prompt_tokens=1024, output_tokens=128)
    facts = provenance.head("simulate-validate", command, asdict(options), options.device)
    document: dict[str, Any] = {**facts, "curves": None, "rows": []}
    with growing_json(document, json_path, "after all loads") as write:

        def add(found: Curves | dict[str, Any]) -> None:
            """The curves come first, then a row per load."""
            if isinstance(found, dict):
                document["rows"].append(found)
            else:
                document["curves"] = msgspec.to_builtins(found)
                if curves_path is not None:
                    write_curves(found, curves_path)
            write()

        with tempfile.TemporaryDirectory(prefix="prelude-bench-") as name:
            try:
                config = _prepare(options, Path(name))
                asyncio.run(_measure(options, config, Path(name), add, say))
            except (AdapterError, StartError) as error:
                raise SystemFailed(str(error)) from error
    return document


def _prepare(options: Options, folder: Path) -> ClusterConfig:
    """Create the model, import the adapters of both parts, and return the cluster's configuration."""
    write_model(options.model, folder / "model", options.device, options.engine_arguments)
    is_cpu = options.device == "cpu"
    config = ClusterConfig.model_validate(
        {
            "model": {"path": folder / "model", "name": "bench", "dtype": "bfloat16"},
            "engine": {
                "device": options.device,
                "max_running_requests": 32 if is_cpu else 128,
                "chunked_prefill_tokens": 512 if is_cpu else 2048,
                **({"max_total_tokens": 32768} if is_cpu else {}),
                "extra_arguments": list(options.engine_arguments),
            },
            "router": {"port": 0},
            "workers": {"unified-0": {"role": "unified"}},
            "adapter_limits": {"max_rank": options.rank, "slots": options.slots},
            "residency": {"disk_bytes": 0},
            "catalog": {"url": f"sqlite:///{folder}/catalog.db"},
            "store": {"url": f"file://{folder}/store"},
        }
    )
    num_adapters = _num_curve_adapters(options) + options.num_adapters
    import_random_adapters(config, [f"a{number}" for number in range(num_adapters)], os.cpu_count() or 1)
    return config


def _num_curve_adapters(options: Options) -> int:
    return options.grid.num_resident + 2 * options.grid.num_cold


async def _measure(
    options: Options,
    config: ClusterConfig,
    folder: Path,
    add: Callable[[Curves | dict[str, Any]], None],
    say: Callable[[str], None],
) -> None:
    say(f"starting a unified worker of {options.model}")
    async with local_cluster(config, folder / "logs") as cluster:
        num_curve = _num_curve_adapters(options)
        names = tuple(f"a{number}" for number in range(num_curve + options.num_adapters))
        endpoint = Endpoint(cluster.url, "bench", ())
        seeds = iter(range(10_000, 20_000))  # no prompt twice

        async def send(wave: Wave) -> Sequence[Record]:
            chosen = msgspec.structs.replace(endpoint, adapters=tuple(names[each] for each in wave.adapters))
            lengths = FixedLengths(wave.prompt_tokens, wave.output_tokens)
            load = Load(
                chosen,
                Workload("wave", "", _SOURCE, lengths),
                next(seeds),
                num_requests=wave.num_requests,
                concurrency=wave.concurrency,
            )
            return (await generate(load)).records

        async def beside(stream: Wave, wave: Wave) -> tuple[Sequence[Record], Sequence[Record]]:
            """Times of the two have different origins; the wave's are moved to the stream's."""
            began_s = time.monotonic()
            first = asyncio.create_task(send(stream))
            await asyncio.sleep(_UNTIL_STREAMING_S)
            late_s = time.monotonic() - began_s
            records = [msgspec.structs.replace(each, end_s=each.end_s + late_s) for each in await send(wave)]
            return await first, records

        say("measuring its curves")
        engine = config.engine
        tokens = engine.max_total_tokens or 200_000
        limits = Limits(engine.chunked_prefill_tokens, engine.max_running_requests, tokens, options.slots)
        text = f"{options.model} on {provenance.hardware(options.device)['cpu' if options.device == 'cpu' else 'gpu']}"
        curves = await measure_curves(send, beside, options.grid, limits, f"measured-{options.model}", text)
        say(f"  {msgspec.json.encode(curves.prefill).decode()} {msgspec.json.encode(curves.decode).decode()}")
        add(curves)
        for number, share in enumerate(options.loads):
            row = await _compare(options, curves, share, endpoint, names[num_curve:], is_first=number == 0)
            add(row)
            say("  " + ", ".join(f"{key} {value}" for key, value in row.items()))


async def _compare(
    options: Options, curves: Curves, share: float, endpoint: Endpoint, names: tuple[str, ...], *, is_first: bool
) -> dict[str, Any]:
    """One load, and the same requests simulated. Adapters are cold in the first load only."""
    rate = share * _capacity_per_s(options, curves)
    lengths = FixedLengths(options.prompt_tokens, options.output_tokens, _RANGE_RATIO)
    workload = Workload("validation", "", _SOURCE, lengths, popularity=Popularity("zipf"))
    chosen = msgspec.structs.replace(endpoint, adapters=names)
    load = Load(chosen, workload, options.seed, duration_s=options.seconds, requests_per_s=rate)
    before, began_s = cpu_use(), time.monotonic()
    records = (await generate(load)).records
    foreign = foreign_cores(before, cpu_use(), time.monotonic() - began_s)
    if failed := sum(each.error is not None for each in records):
        raise SystemFailed(f"{failed} of {len(records)} requests failed at {rate:.1f} requests/s")
    outcome = simulated(records, names, curves, is_warm=not is_first)
    return {
        "load": share,
        "requests_per_s": round(rate, 2),
        "requests": len(records),
        "foreign_cores": round(foreign, 2),
        **errors(records, outcome),
    }


def _capacity_per_s(options: Options, curves: Curves) -> float:
    """Of one worker, with mean lengths: uniform from 0.3 to 1."""
    mean = (1 + _RANGE_RATIO) / 2
    return 1 / sum(request_s(curves, mean * options.prompt_tokens, mean * options.output_tokens, 1.0))


def simulated(records: Sequence[Record], names: Sequence[str], curves: Curves, *, is_warm: bool) -> Outcome:
    """The same requests at the same times in a simulated cluster of one unified worker."""
    numbers = {name: number for number, name in enumerate(names)}
    arrivals = [
        Arrival(
            each.intended_s,
            None if each.adapter is None else numbers[each.adapter],
            each.prompt_tokens or 1,
            each.output_tokens,
        )
        for each in sorted(records, key=lambda each: each.intended_s)
    ]
    return simulate(
        Scenario(curves, Pools(unified=1), Replay(arrivals), host_adapters=max(1, len(names)), is_warm=is_warm)
    )


def errors(records: Sequence[Record], outcome: Outcome) -> dict[str, float]:
    """Measured and simulated figures, and how much too high the simulated ones are."""
    began_s = min(each.intended_s for each in records)
    tpots = [each.tpot_s for each in records if each.tpot_s is not None]
    pairs = {
        "throughput_per_s": (
            len(records) / (max(each.end_s for each in records) - began_s),
            len(outcome.end_s) / (max(outcome.end_s) - began_s),
        )
    }
    for share in (0.5, 0.95):
        pairs[f"ttft_ms_p{100 * share:.0f}"] = (
            1000 * quantile([each.ttft_s for each in records], share),
            1000 * quantile(outcome.ttft_s, share),
        )
    pairs["tpot_ms_p50"] = (
        1000 * statistics.median(tpots),
        1000 * statistics.median(each for each in outcome.tpot_s if each == each),
    )
    found = {}
    for name, (measured, simulated_) in pairs.items():
        found[f"measured_{name}"], found[f"simulated_{name}"] = round(measured, 2), round(simulated_, 2)
        found[f"error_{name}"] = round(simulated_ / measured - 1, 3)
    return found
