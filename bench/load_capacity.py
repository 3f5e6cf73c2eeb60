"""Benchmark of the load generator itself: how many streamed events it takes per second, and per second of CPU time.

A mock worker, a process of its own, streams to many clients an event every few milliseconds, without a model. What the
generator's process uses is its CPU time, so that number holds on a busy machine. Events are due at fixed times, so how
far the measured gaps are from the mock's is the error of an ITL under this load; the mock's own lateness is part of it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.errors import SystemFailed
from bench.load.client import ask_models
from bench.load.generator import generate
from bench.load.options import Endpoint, Load
from bench.load.record import Record
from bench.measuring import provenance
from bench.measuring.contention import cpu_use, foreign_cores
from bench.measuring.output import require_folders, write_json
from bench.systems.mock_worker import HOST
from bench.systems.routers import MODEL, running_workers, workers
from bench.workloads.catalog import workload_named
from bench.workloads.lengths import FixedLengths

GOAL_EVENTS_PER_CPU_S = 5000.0
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    repeats: int = 5
    concurrency: int = 64
    num_requests: int = 640  # per repeat
    num_events: int = 64  # of each stream
    event_gap_ms: float = 10.0  # smaller ones come together and look cheaper
    prompt_tokens: int = 1024


QUICK = Options(repeats=1, concurrency=4, num_requests=8, num_events=8)


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print, write the file; returns its content. Raises BenchError."""
    require_folders(json_path)
    with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
        repeats = uvloop.run(_measure(options, Path(folder), progress))
    found = {
        **provenance.head("load-capacity", command, asdict(options)),
        "events_per_s": round(statistics.median(each["events_per_s"] for each in repeats), 1),
        "events_per_cpu_s": round(statistics.median(each["events_per_cpu_s"] for each in repeats), 1),
        "itl_error_ms_p50": round(statistics.median(each["itl_error_ms"]["p50"] for each in repeats), 3),
        "goal_events_per_cpu_s": GOAL_EVENTS_PER_CPU_S,
        "repeats": repeats,
    }
    progress(
        f"medians: {found['events_per_s']:.0f} events/s, {found['events_per_cpu_s']:.0f} per CPU second; the goal is "
        f"{GOAL_EVENTS_PER_CPU_S:.0f}"
    )
    write_json(found, json_path)
    return found


async def _measure(options: Options, folder: Path, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    settings = workers(options.num_events, options.event_gap_ms / 1000, is_paced=True)
    port = settings["decode-0"].engine_port
    workload = replace(workload_named("random"), lengths=FixedLengths(options.prompt_tokens, options.num_events))
    load = Load(
        Endpoint(f"http://{HOST}:{port}", MODEL),
        workload,
        num_requests=options.num_requests,
        concurrency=options.concurrency,
    )
    found = []
    with running_workers(settings, folder):
        await ask_models(load.endpoint.url, {}, _START_TIMEOUT_S)
        for repeat in range(options.repeats):
            before = cpu_use()
            outcome = await generate(load)
            failed = [each for each in outcome.records if each.error is not None]
            if failed:
                raise SystemFailed(f"{len(failed)} requests failed, first: {failed[0].error}: {failed[0].detail}")
            num_events = sum(len(each.token_s) for each in outcome.records)
            seconds = max(each.end_s for each in outcome.records)
            num_reads = sum(len(set(each.token_s)) for each in outcome.records)  # events of one read have one time
            rate = num_events / outcome.cpu_s
            wrong = itl_errors_ms(outcome.records, options.event_gap_ms)
            errors = {f"p{p}": round(float(np.percentile(wrong, p)), 3) for p in (50, 90, 99)}
            found.append(
                {
                    "num_events": num_events,
                    "cpu_s": round(outcome.cpu_s, 4),
                    "events_per_read": round(num_events / num_reads, 2),
                    "duration_s": round(seconds, 3),
                    "events_per_s": round(num_events / seconds, 1),
                    "events_per_cpu_s": round(rate, 1),
                    "itl_error_ms": errors,
                    "foreign_cores": round(foreign_cores(before, cpu_use(), seconds), 2),
                }
            )
            progress(
                f"  repeat {repeat + 1}/{options.repeats}: {num_events} events, {rate:.0f} per CPU second; "
                f"gaps wrong by {errors['p50']:.2f} ms (p50)"
            )
    return found


def itl_errors_ms(records: Iterable[Record], gap_ms: float) -> np.ndarray:
    """How far each measured gap between two events is from the server's."""
    gaps_s = np.concatenate([np.diff(each.token_s) for each in records])
    return np.abs(gaps_s * 1000 - gap_ms)
