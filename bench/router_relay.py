"""Benchmark of the request path: a router's CPU time per streamed event and per request, and its added latency.

Mock workers answer as SGLang does, an event every few milliseconds. A closed-loop client drives Prelude's router and,
where it is installed, SGLang's Rust gateway; without a router it calls the decode worker, which gives the latency that
routers add to. In each repeat and for each load the systems run one after the other, every second repeat in reverse.
CPU times are those of the router's own processes, so they hold on a busy machine; latencies do not.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import uvloop

from bench.load.summary import quantile
from bench.measuring import provenance
from bench.measuring.contention import cpu_use, foreign_cores
from bench.measuring.http_load import HttpLoad, http_load
from bench.measuring.output import require_folder, write_json
from bench.systems.routers import (
    GATEWAY_VERSION,
    RunningSystem,
    gateway_python,
    our_router,
    protected_router,
    request_bytes,
    running_workers,
    sglang_gateway,
    workers,
)

_LOAD_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    concurrency: tuple[int, ...] = (32, 128)
    repeats: int = 3
    num_events: int = 64  # of each stream, [DONE] not counted
    event_gap_ms: float = 10.0
    streams_per_connection: int = 12  # in each load
    requests_per_connection: int = 60
    protected: bool = False  # also measure a router with keys, quotas, and TLS for clients and to its workers


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load on one system."""

    system: str  # "ours", "ours_protected", "sglang_router", or "direct" without a router
    concurrency: int
    is_streaming: bool
    repeat: int
    num_requests: int
    num_events: int  # all of the streams, with each one's last
    duration_s: float
    cpu_s: float  # of the router
    first_ms_p50: float  # until the first event of a stream, or the whole answer
    first_ms_p99: float
    foreign_cores: float  # that processes outside of the benchmark kept busy meanwhile
    is_spread: bool = False  # the connections began spread over the length of a stream, else at the same moment


def run(
    options: Options,
    sglang_router: str | None,
    command: str,
    json_path: Path | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measure, print the table, write the file; returns its content. Raises BenchError.

    `sglang_router`: a Python interpreter with sglang-router; None: the gateway is measured if this one has it.
    """
    require_folder(json_path)
    gateway = gateway_python(sglang_router)
    if gateway is None:
        progress(f"sglang-router {GATEWAY_VERSION} is not installed: measuring Prelude's router alone.")
    facts = provenance.head("router", command, asdict(options))
    facts["versions"] |= {name: version(name) for name in ("uvloop", "httptools")}
    facts["versions"]["sglang-router"] = GATEWAY_VERSION if gateway else "not installed"
    with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
        measurements = uvloop.run(_measure_all(options, gateway, Path(folder), progress))
    document = {**summary(measurements), **facts, "repeats": [asdict(each) for each in measurements]}
    progress("\n" + table(document))
    write_json(document, json_path)
    return document


async def _measure_all(
    options: Options, gateway: str | None, folder: Path, progress: Callable[[str], None]
) -> list[Measurement]:
    settings = workers(options.num_events, options.event_gap_ms / 1000)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(running_workers(settings, folder))
        systems = [await stack.enter_async_context(our_router(settings, folder))]
        if options.protected:
            protected = protected_router(settings, folder / "protected")
            systems.append(await stack.enter_async_context(protected))
        if gateway is not None:
            systems.append(await stack.enter_async_context(sglang_gateway(gateway, settings, folder)))
        systems.append(RunningSystem("direct", settings["decode-0"].engine_port, None))
        measurements = []
        kinds = ((True, False), (True, True), (False, False))  # is_streaming, is_spread
        loads = [(*kind, n) for kind in kinds for n in options.concurrency]
        for repeat in range(options.repeats):
            for is_streaming, is_spread, concurrency in loads:
                for system in reversed(systems) if repeat % 2 else systems:
                    measured = await _measure(
                        system, options, concurrency, repeat, is_streaming=is_streaming, is_spread=is_spread
                    )
                    measurements.append(measured)
                    progress(f"  repeat {repeat + 1}/{options.repeats}  {_line(measured)}")
        return measurements


async def _measure(
    system: RunningSystem, options: Options, concurrency: int, repeat: int, *, is_streaming: bool, is_spread: bool
) -> Measurement:
    per_connection = options.streams_per_connection if is_streaming else options.requests_per_connection
    num_requests, num_events = concurrency * per_connection, options.num_events if is_streaming else 0
    spread_s = num_events * options.event_gap_ms / 1000 if is_spread else 0.0
    request = request_bytes(is_streaming=is_streaming, num_events=options.num_events, key=system.key)

    async def load(count: int, on_connected: Callable[[], None] = lambda: None) -> HttpLoad:
        return await http_load(
            system.port,
            request,
            count,
            concurrency,
            num_events=num_events,
            timeout_s=_LOAD_TIMEOUT_S,
            tls=system.tls,
            spread_s=spread_s,
            on_connected=on_connected,
        )

    await load(concurrency)  # warms connections up
    machine_before = cpu_use()
    cpu_s: list[float] = []  # before the load, once it is connected, and after it
    done = await load(num_requests, lambda: cpu_s.append(_router_cpu_s(system)))
    cpu_s.append(_router_cpu_s(system))
    machine_after = cpu_use()
    return Measurement(
        system=system.name,
        concurrency=concurrency,
        is_streaming=is_streaming,
        repeat=repeat,
        num_requests=num_requests,
        num_events=done.num_events,
        duration_s=round(done.duration_s, 4),
        cpu_s=round(cpu_s[1] - cpu_s[0], 3),
        first_ms_p50=round(1000 * quantile(done.first_s, 0.50), 3),
        first_ms_p99=round(1000 * quantile(done.first_s, 0.99), 3),
        is_spread=is_spread,
        foreign_cores=round(foreign_cores(machine_before, machine_after, done.duration_s), 2),
    )


def _router_cpu_s(system: RunningSystem) -> float:
    """So far, in user and kernel mode, of the router with its processes."""
    if system.pid is None:
        return 0.0
    router = psutil.Process(system.pid)
    return sum(each.cpu_times().user + each.cpu_times().system for each in (router, *router.children(recursive=True)))


# ---- what is reported -----------------------------------------------------------------------------------------------


def summary(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """By system, figure and concurrency, medians of the repeats.

    `cpu_us_per_event`, `first_event_ms_p50` and `first_event_ms_p99` are of streams, `cpu_us_per_request` is of short
    requests that are not streamed. A stream's CPU includes what its request costs, divided by its events.
    Opening connections, with TLS handshakes, is in neither. Of `direct`, the mock worker without a router, there are
    latencies only; `added_first_event_ms_…` is over those. Streams of equal length that begin at the same moment stay
    together, and the last one waits for all others. `spread_…` is of loads whose connections begin spread over the
    length of a stream.
    """
    found: dict[str, Any] = {}
    for system in dict.fromkeys(each.system for each in measurements):
        own = [each for each in measurements if each.system == system]
        streams = [each for each in own if each.is_streaming and not each.is_spread]
        spread = [each for each in own if each.is_spread]
        figures = {
            "first_event_ms_p50": _medians(streams, lambda each: each.first_ms_p50),
            "first_event_ms_p99": _medians(streams, lambda each: each.first_ms_p99),
            "spread_first_event_ms_p50": _medians(spread, lambda each: each.first_ms_p50),
            "spread_first_event_ms_p99": _medians(spread, lambda each: each.first_ms_p99),
        }
        if system != "direct":
            whole = [each for each in own if not each.is_streaming]
            figures["cpu_us_per_event"] = _medians(streams, lambda each: 1e6 * each.cpu_s / each.num_events)
            figures["cpu_us_per_request"] = _medians(whole, lambda each: 1e6 * each.cpu_s / each.num_requests)
        found[system] = figures
    for system, figures in found.items():
        for name in [name for name in figures if "first_event_ms" in name]:
            if system != "direct" and "direct" in found:
                direct = found["direct"][name]
                figures[f"added_{name}"] = {n: round(value - direct[n], 3) for n, value in figures[name].items()}
    return found


def _medians(measurements: Sequence[Measurement], figure: Callable[[Measurement], float]) -> dict[str, float]:
    """By concurrency, which JSON makes a string."""
    values: dict[str, list[float]] = {}
    for each in measurements:
        values.setdefault(str(each.concurrency), []).append(figure(each))
    return {concurrency: round(statistics.median(each), 3) for concurrency, each in values.items()}


FIGURES = (
    ("CPU per streamed event", "cpu_us_per_event", "us"),
    ("CPU per short request, not streamed", "cpu_us_per_request", "us"),
    ("time to the first event, p50", "first_event_ms_p50", "ms"),
    ("time to the first event, p99", "first_event_ms_p99", "ms"),
    ("the same, begun spread over a stream's length, p50", "spread_first_event_ms_p50", "ms"),
    ("the same, begun spread over a stream's length, p99", "spread_first_event_ms_p99", "ms"),
)


def table(document: dict[str, Any]) -> str:
    """Every figure by concurrency, the systems beside each other."""
    names = ("ours", "ours_protected", "sglang_router", "direct")
    systems = [name for name in names if name in document]
    lines = ["".join((f"{'':<68}", *(f"{name:>15}" for name in systems)))]
    for text, key, unit in FIGURES:
        for n in document["ours"].get(key, ()):
            cells = [f"{document[name][key][n]:.2f} {unit}" if key in document[name] else "" for name in systems]
            lines.append("".join((f"{text + ', ' + n + ' at a time':<68}", *(f"{cell:>15}" for cell in cells))))
    return "\n".join(lines)


def _line(measured: Measurement) -> str:
    kind, count = ("streams", measured.num_events) if measured.is_streaming else ("requests", measured.num_requests)
    kind = "spread streams" if measured.is_spread else kind
    return (
        f"{measured.concurrency:>4} {kind:<15}{measured.system:<14}{1e6 * measured.cpu_s / count:8.1f} us CPU each"
        f"{measured.first_ms_p50:9.2f} ms p50{measured.first_ms_p99:9.2f} ms p99"
    )
