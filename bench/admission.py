"""Benchmark of admission: how long the most expensive request bodies block an event loop for other requests.

While one body after the other is sent, a probe asks for a page that costs nothing, every few milliseconds. Its longest
wait is how long the loop stood still, and what the machine's other processes add. Behind the router stand mock workers
in the first part, and one real engine on the CPU in the second, whose server is asked too.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import uvloop

from bench.errors import SystemFailed
from bench.measuring import provenance
from bench.measuring.contention import cpu_use, foreign_cores
from bench.measuring.output import require_folders, write_json
from bench.systems.costly_bodies import COMPLETIONS, CostlyBody, admitted, refused
from bench.systems.mock_worker import HOST
from bench.systems.routers import MODEL, our_router, running_workers, workers
from cluster.config.schema import ClusterConfig
from cluster.errors import StartError
from cluster.local.demo import make_model
from cluster.local.supervisor import local_cluster

GOAL_MS = 100.0
_PROBE_EVERY_S = 0.005
_SETTLE_S = 0.2  # before and after a body
_IDLE_S = 2.0  # of the rows without a body
_TIMEOUT_S = 120.0
_CONTEXT = {"router": 131_072, "engine": 32_768}


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    repeats: int = 3
    engine: bool = True
    only: tuple[str, ...] = ()  # bodies whose name has one of these words; all


@dataclass(frozen=True, slots=True)
class Measurement:
    """One body, sent once."""

    part: str  # "router", or "engine": with a real engine behind it
    body: str
    num_bytes: int
    repeat: int
    status: int
    seconds: float  # until the answer was complete
    router_ms: float  # the probe's longest wait for the router
    engine_ms: float | None  # and for the engine's server
    foreign_cores: float  # that processes outside of the benchmark kept busy meanwhile


class Probe:
    """Asks for a page again and again, in a thread, with a blocking connection."""

    def __init__(self, port: int, path: str) -> None:
        self._port, self._path = port, path
        self._longest_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[Probe]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(_TIMEOUT_S)

    @property
    def longest_ms(self) -> float:
        """Valid after the context."""
        return round(1000 * self._longest_s, 1)

    def _run(self) -> None:
        connection = HTTPConnection(HOST, self._port, timeout=_TIMEOUT_S)
        while not self._stop.is_set():
            start = time.perf_counter()
            with contextlib.suppress(OSError, HTTPException):
                connection.request("GET", self._path)
                connection.getresponse().read()
            self._longest_s = max(self._longest_s, time.perf_counter() - start)
            self._stop.wait(_PROBE_EVERY_S)
        connection.close()


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print the table, write the file; returns its content. Raises BenchError."""
    require_folders(json_path)
    facts = provenance.head("admission", command, asdict(options))
    with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
        measurements = uvloop.run(_measure_all(options, Path(folder), progress))
    document = {**facts, "bodies": summary(measurements), "repeats": [asdict(each) for each in measurements]}
    progress("\n" + table(document))
    write_json(document, json_path)
    return document


async def _measure_all(options: Options, folder: Path, progress: Callable[[str], None]) -> list[Measurement]:
    found: list[Measurement] = []
    settings = workers(2, 0.01)
    with running_workers(settings, folder):
        async with our_router(settings, folder, 1) as system:
            bodies = refused(MODEL, 16 * 1024**2) + admitted(MODEL, _CONTEXT["router"], 128)
            found += await _measure("router", options, bodies, system.port, None, progress)
    if options.engine:
        async with contextlib.AsyncExitStack() as stack:
            try:
                cluster = await stack.enter_async_context(local_cluster(_config(folder), folder / "logs"))
            except StartError as error:
                raise SystemFailed(str(error)) from error
            config = cluster.config
            ports = config.router.port, config.workers["unified-0"].engine_port
            found += await _measure("engine", options, admitted("demo", _CONTEXT["engine"], 16, 600), *ports, progress)
    return found


def _config(folder: Path) -> ClusterConfig:
    """One unified worker with the demo model, whose context is long."""
    model = folder / "model"
    make_model(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": _CONTEXT["engine"]}))
    return ClusterConfig.model_validate({
        "model": {"path": model, "name": "demo", "dtype": "float32", "tool_call_parser": "qwen25"},
        "engine": {"device": "cpu", "max_total_tokens": 16_384, "chunked_prefill_tokens": 256},
        "router": {"host": HOST, "port": 0},
        "workers": {"unified-0": {"role": "unified"}},
    })  # fmt: skip


async def _measure(
    part: str,
    options: Options,
    bodies: Sequence[CostlyBody],
    router_port: int,
    engine_port: int | None,
    progress: Callable[[str], None],
) -> list[Measurement]:
    """Everything in this process blocks: its own event loop has nothing to do meanwhile."""
    wanted = [each for each in bodies if not options.only or any(word in each.name for word in options.only)]
    found = []
    for repeat in range(options.repeats):
        for body in (CostlyBody("nothing", COMPLETIONS, b""), *wanted):
            probes = [Probe(router_port, "/health")]
            if engine_port is not None:
                probes.append(Probe(engine_port, "/v1/models"))
            machine_before, start = cpu_use(), time.monotonic()
            with contextlib.ExitStack() as stack:
                for probe in probes:
                    stack.enter_context(probe.running())
                time.sleep(_SETTLE_S if body.body else _IDLE_S)  # noqa: ASYNC251 as said above
                status, seconds = _send(router_port, body)
                time.sleep(_SETTLE_S)  # noqa: ASYNC251
            foreign = foreign_cores(machine_before, cpu_use(), time.monotonic() - start)
            measured = Measurement(
                part, body.name, len(body.body), repeat, status, round(seconds, 3),
                probes[0].longest_ms, probes[1].longest_ms if engine_port is not None else None, round(foreign, 2),
            )  # fmt: skip
            found.append(measured)
            engine = "" if measured.engine_ms is None else f", engine {measured.engine_ms:.1f} ms"
            progress(
                f"  {part}, repeat {repeat + 1}: {body.name}: status {status} after {seconds:.2f} s, router "
                f"{measured.router_ms:.1f} ms{engine}"
            )
    return found


def _send(port: int, body: CostlyBody) -> tuple[int, float]:
    """Status (0: none, the connection was closed) and seconds."""
    if not body.body:
        return 200, 0.0
    start = time.perf_counter()
    connection = HTTPConnection(HOST, port, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", body.path, body.body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status, time.perf_counter() - start
    except (OSError, HTTPException):
        return 0, time.perf_counter() - start
    finally:
        connection.close()


# ---- what is reported -----------------------------------------------------------------------------------------------


def summary(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One row per part and body, medians of the repeats."""
    rows: dict[tuple[str, str], list[Measurement]] = {}
    for each in measurements:
        rows.setdefault((each.part, each.body), []).append(each)
    return [
        {
            "part": part,
            "body": body,
            "num_bytes": own[0].num_bytes,
            "status": sorted({each.status for each in own}),
            "seconds": round(statistics.median(each.seconds for each in own), 3),
            "router_ms": round(statistics.median(each.router_ms for each in own), 1),
            "engine_ms": None
            if own[0].engine_ms is None
            else round(statistics.median(each.engine_ms or 0 for each in own), 1),
            "foreign_cores": round(statistics.median(each.foreign_cores for each in own), 2),
        }
        for (part, body), own in rows.items()
    ]


def table(document: dict[str, Any]) -> str:
    """Every body, the router's and the engine's longest stop beside each other."""
    lines = [f"{'':<48}{'bytes':>10}{'status':>8}{'seconds':>9}{'router':>11}{'engine':>11}"]
    for row in document["bodies"]:
        engine = "" if row["engine_ms"] is None else f"{row['engine_ms']:.1f} ms"
        status = "/".join(map(str, row["status"]))
        name = f"{row['part']}: {row['body']}"
        lines.append(
            f"{name:<48}{row['num_bytes']:>10}{status:>8}{row['seconds']:>9.2f}{row['router_ms']:>8.1f} ms{engine:>11}"
        )
    return "\n".join(lines)
