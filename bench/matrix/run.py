"""`prelude bench matrix`: starts the systems, measures each cell on all of them in turn, writes as results come."""

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from bench.errors import BenchError, SystemFailed
from bench.load.document import document as load_document
from bench.load.generator import generate, processes_for
from bench.load.options import Endpoint, Load
from bench.load.run import warm_up_of
from bench.matrix import results
from bench.matrix.options import REFT_RANK, SEED, SYSTEMS, Options
from bench.matrix.plan import in_turn
from bench.matrix.report import markdown
from bench.matrix.results import Measured
from bench.matrix.systems import Starter, gpus_of
from bench.measuring import provenance
from bench.measuring.contention import cpu_use, foreign_cores
from bench.measuring.output import require_folder, write_json
from bench.systems.engines import DTYPE
from bench.systems.models import MODELS
from bench.workloads.workload import Workload

_REPEAT_SEED = 10_007  # added to the seed for each repeat: prompts that no cache has seen
_CELL_SEED = 101
_MIN_WARM_UP = 16


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print the table, write the file; returns the JSON's content. Raises BenchError.

    What was measured before an error or Ctrl-C is in the file.
    """
    options.check()
    require_folder(json_path)
    facts = facts_of(options, command)
    measured: list[Measured] = []
    found: dict[str, Any] = {}

    def publish(one: Measured) -> None:
        nonlocal found
        measured.append(one)
        found = results.document(facts, options, measured)
        write_json(found, json_path)

    with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
        try:
            asyncio.run(_measure_all(options, Path(folder), command, progress, publish))
        except asyncio.CancelledError:
            raise BenchError(f"stopped after {len(measured)} loads; the file has them") from None
        finally:
            if found:
                progress("\n" + markdown(found))
    return found


def facts_of(options: Options, command: str) -> dict[str, Any]:
    """Where the numbers come from."""
    model = MODELS[options.model]
    settings = {
        "systems": {name: SYSTEMS[name] for name in options.systems},
        "cells": [cell.label for cell in options.cells],
        "slo_ms": options.slo_ms,
        "duration_s": options.duration_s,
        "repeats": options.repeats,
        "slots": options.num_slots,
        "lora_rank": options.lora_rank,
        "reft_rank": REFT_RANK,
        "adapters_checked": options.num_checked,
        "model": options.model,
        "model_sizes": {
            "hidden_size": model.hidden, "num_hidden_layers": model.num_layers, **(model.config or {}), "dtype": DTYPE,
            "weights": "random",
        },
        "device": options.device,
        "gpus": options.num_gpus,
        "tensor_parallel": options.tensor_parallel,
        "through": options.through,
        "host_adapters": options.host_adapters,
        "engine_arguments": list(options.engine_arguments),
    }  # fmt: skip
    return provenance.head("matrix", command, settings, options.device)


async def _measure_all(
    options: Options, folder: Path, command: str, progress: Callable[[str], None], publish: Callable[[Measured], None]
) -> None:
    task = asyncio.current_task()
    assert task is not None
    # SIGTERM acts as Ctrl-C: the engines are stopped in order, which removes their shared memory.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with contextlib.AsyncExitStack() as stack:
        base, systems = await Starter(options, folder, stack, gpus_of(options)).start_all(progress)
        progress(_checked(options))
        total = len(options.cells) * len(systems) * options.repeats
        for number, (repeat, cell, name) in enumerate(in_turn(options.cells, options.systems, options.repeats), 1):
            one = await measure(options, name, systems[name], repeat, cell, base.vocabulary, command)
            publish(one)
            progress(_line(number, total, one))


async def measure(
    options: Options, name: str, endpoint: Endpoint, repeat: int, cell: Workload, vocabulary: int, command: str
) -> Measured:
    """One load on one system, after a warm-up of the same shape. Raises BenchError."""
    load = load_of(options, endpoint, repeat, cell, vocabulary)
    at_a_time = cell.concurrency or _MIN_WARM_UP
    warm_up = await generate(warm_up_of(load, max(cell.warm_up, at_a_time)), is_apart=True)
    if warm_up.is_stopped:
        raise asyncio.CancelledError
    before, began_at = cpu_use(), asyncio.get_running_loop().time()
    outcome = await generate(load, is_apart=True)
    foreign = foreign_cores(before, cpu_use(), asyncio.get_running_loop().time() - began_at)
    if outcome.is_stopped:
        raise asyncio.CancelledError
    found = load_document(load, outcome, command, options.slo_ms)
    if not found["summary"]["num_good"]:
        said = found["summary"]["errors"]["most_frequent"][0]
        raise SystemFailed(f"{name}: every request of {cell.label} failed: {said['kind']}: {said['detail']}")
    return Measured(cell.label, name, repeat, found, foreign)


def load_of(options: Options, endpoint: Endpoint, repeat: int, cell: Workload, vocabulary: int) -> Load:
    """The load of a cell: the same requests for every system, others for every repeat and cell."""
    workload = replace(cell, vocabulary=vocabulary)
    load = Load(
        endpoint=msgspec.structs.replace(endpoint, adapters=adapters_of(cell, endpoint.adapters, options.max_adapters)),
        workload=workload,
        seed=SEED + _REPEAT_SEED * repeat + _CELL_SEED * options.cells.index(cell),
        duration_s=options.duration_s,
        requests_per_s=workload.requests_per_s,
        concurrency=workload.concurrency,
    )
    return msgspec.structs.replace(load, processes=processes_for(load))


def adapters_of(cell: Workload, names: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Those of a cell. Behind the first `count` names are, if there are any, the same adapters for all positions."""
    own, everywhere = names[:count], names[count:]
    return tuple(
        everywhere[number] if everywhere and cell.is_for_all_positions(number) else own[number]
        for number in range(cell.num_adapters)
    )


def _checked(options: Options) -> str:
    left = options.max_adapters - options.num_checked
    which = f"each of the first {options.num_checked}" if left else "every"
    unchecked = f"; the other {left} were not asked" if left else ""
    return f"{which} adapter{'s' if left else ''} gives its own answer on every system that has adapters{unchecked}"


def _line(number: int, total: int, one: Measured) -> str:
    summary = one.document["summary"]
    failed = f", {summary['num_failed']} FAILED" if summary["num_failed"] else ""
    ttft = "-" if summary["ttft_ms"] is None else f"{summary['ttft_ms']['p50']:.0f} ms"
    return (
        f"  {number}/{total}  {one.cell:<28} {one.system:<9} {summary['requests_per_s']:8.2f} requests/s, "
        f"TTFT p50 {ttft}, goodput {summary['goodput']['share']:.0%}{failed}"
    )
