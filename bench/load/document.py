"""The file of a load: JSON with every record."""

from typing import Any

import msgspec

from bench.load.generator import Outcome
from bench.load.options import Load
from bench.load.record import Record
from bench.load.summary import duration_s, summary
from bench.load.sweep import Found
from bench.measuring import provenance
from bench.workloads.lengths import PhasedLengths

FORMAT = "prelude-bench-load/1"
SWEEP_FORMAT = "prelude-bench-load-sweep/1"
_HIDDEN = "…"
_DIGEST_REQUESTS = 256


def document(load: Load, outcome: Outcome, command: str, slo_ms: dict[str, float]) -> dict[str, Any]:
    """What is written with --json. docs/benchmarks.md has the fields."""
    return {
        "format": FORMAT,
        **provenance.head("load", command, settings(load)),
        "workload": described(load),
        "generator": generator_of(outcome),
        "summary": summary(outcome.records, slo_ms),
        **phases_of(load, outcome, slo_ms),
        "requests": [msgspec.to_builtins(record) for record in outcome.records],
    }


def phases_of(load: Load, outcome: Outcome, slo_ms: dict[str, float]) -> dict[str, Any]:
    """The summary of each phase, of the requests that were due in it; nothing for a load without phases."""
    lengths = load.workload.lengths
    if not isinstance(lengths, PhasedLengths):
        return {}
    records: list[list[Record]] = [[] for _ in lengths.phases]
    for record in outcome.records:
        records[lengths.phase_of(record.session)].append(record)
    found = [
        {**msgspec.to_builtins(phase), "summary": summary(due, slo_ms)}
        for phase, due in zip(lengths.phases, records, strict=True)
        if due  # none after Ctrl-C
    ]
    return {"phases": found}


def generator_of(outcome: Outcome) -> dict[str, Any]:
    """What it cost to make the load. `cpu_share` is of one core, mean of the processes: near 1 it is the bottleneck."""
    seconds = duration_s(outcome.records)
    return {
        "processes": outcome.num_processes,
        "cpu_s": round(outcome.cpu_s, 3),
        "cpu_share": round(outcome.cpu_s / outcome.num_processes / seconds, 3) if seconds else 0.0,
        "stopped_early": outcome.is_stopped,
    }


def sweep_document(
    load: Load, outcome: Outcome, found: Found, command: str, slo_ms: dict[str, float]
) -> dict[str, Any]:
    """What a sweep writes: the file of its last load without the requests, and the summary of every rate."""
    content = document(load, outcome, command, slo_ms)
    for name in ("requests", "summary"):
        del content[name]
    return {
        **content,
        "format": SWEEP_FORMAT,
        "benchmark": "load-sweep",
        "slo_ms": slo_ms,
        "best_requests_per_s": found.best,
        "is_bounded": found.is_bounded,
        "ended": found.ended,
        "probes": probes_of(found),
    }


def probes_of(found: Found) -> list[dict[str, Any]]:
    """Every rate that was tried, with its figures."""
    return [
        {
            "requests_per_s": each.rate,
            "came_per_s": each.came_per_s,
            "share": each.share,
            "summary": each.summary,
        }
        for each in found.probes
    ]


def settings(load: Load) -> dict[str, Any]:
    """How the load was made; without secrets, and without a list of all adapters."""
    endpoint = load.endpoint
    return {
        "url": endpoint.url,
        "model": endpoint.model,
        "num_adapters": len(endpoint.adapters),
        "adapter_field": endpoint.adapter_field,
        "headers": dict.fromkeys(endpoint.headers, _HIDDEN),
        "extra_body": endpoint.extra_body,
        "ignore_eos": endpoint.ignore_eos,
        "timeout_s": endpoint.timeout_s,
        "seed": load.seed,
        "num_requests": load.num_requests,
        "duration_s": load.duration_s,
        "requests_per_s": load.requests_per_s,
        "concurrency": load.concurrency,
    }


def described(load: Load) -> dict[str, Any]:
    """The workload with its parameters and the digest of its first requests.

    Of a fixed number, whether they were sent or not: how many are sent in a given time is up to the server.
    """
    workload = load.workload
    return {
        "name": workload.name,
        "text": workload.text,
        "source": workload.source,
        "lengths": "chat" if workload.is_chat else msgspec.to_builtins(workload.lengths),
        **({} if workload.scale == 1 else {"scale": workload.scale}),
        "popularity": msgspec.to_builtins(workload.popularity),
        "sha256": load.stream().digest(_DIGEST_REQUESTS),
        "num_digested": _DIGEST_REQUESTS,
    }
