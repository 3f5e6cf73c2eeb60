"""Benchmark of streaming: what it costs an engine's HTTP server, one process, and so the whole engine.

One unified engine, asked for the base model, for each bound on events per second. Loads whose answers are all streamed
and loads of which none is take turns. Server time per token is the process's own CPU time, which holds on a busy
machine, too.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import psutil

from adapters.model.base_model import MODULES
from bench.errors import BenchError, SystemFailed
from bench.load.strict import stopwatch
from bench.measuring import provenance
from bench.measuring.output import growing_json, require_folders
from bench.measuring.quantile import quantile
from bench.options import Options as EngineOptions
from bench.options import Shape
from bench.systems.engines import engine_spec, running_engine
from bench.systems.models import write_model
from engine.arguments import AdapterSlots
from engine.hooks.report import read_reports

_FIRST_TOKEN_ID, _TOKEN_IDS = 10, 390  # of prompts; every model's tokenizer has them
_TIMEOUT_S = 600.0
_DONE, _ERROR = b"data: [DONE]\n\n", b'data: {"error"'


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    bounds: tuple[int, ...] = (0, 200)  # events per second, 0 for none: an engine for each
    concurrency: int = 16
    num_requests: int = 64  # per load
    prompt_tokens: int = 16
    generated_tokens: int = 128
    repeats: int = 3
    model: str = "tiny"  # a key of bench.systems.models.MODELS
    device: str = "cpu"
    engine_arguments: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises BenchError."""
        if not self.bounds or min(self.bounds) < 0:
            raise BenchError(f"--bounds {self.bounds}: events per second, 0 for no bound")


QUICK = Options(bounds=(20,), num_requests=4, concurrency=2, generated_tokens=32, repeats=1)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one request saw."""

    first_s: float  # from its begin to the first event; of an answer that is not streamed, to its end
    events: int


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print a line per bound, write the file; returns its content. Raises BenchError."""
    options.check()
    require_folders(json_path)
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {**provenance.head("streams", command, asdict(options), options.device), "rows": rows}
    with (
        growing_json(document, json_path, "after all loads") as write,
        tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder,
    ):

        def add(row: dict[str, Any]) -> None:
            rows.append(row)
            document["medians"] = medians(rows)
            write()
            progress(f"  {_text(row)}")

        asyncio.run(_measure(options, Path(folder), add, progress))
    for row in document["medians"]:
        progress(_text(row))
    return document


def medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each bound, streamed and not; streamed ones have their requests/s relative to the others."""
    found = []
    for bound in dict.fromkeys(row["bound"] for row in rows):
        rates = {}
        for streamed in (False, True):
            chosen = [row for row in rows if (row["bound"], row["streamed"]) == (bound, streamed)]
            if chosen:
                middle = {key: statistics.median(row[key] for row in chosen) for key in chosen[0] if key != "repeat"}
                rates[streamed] = middle["requests_per_s"]
                found.append({**middle, "bound": bound, "streamed": streamed})
        if len(rates) == 2:
            found[-1]["of_not_streamed"] = round(rates[True] / rates[False], 3)
    return found


def _text(row: dict[str, Any]) -> str:
    kind = "streamed" if row["streamed"] else "whole"
    bound = f"at most {row['bound']} events/s" if row["bound"] else "no bound"
    ratio = f", {row['of_not_streamed']:.2f} of whole answers" if "of_not_streamed" in row else ""
    return (
        f"{bound:24} {kind:8} {row['requests_per_s']:8.2f} requests/s, {row['server_us_per_token']:6.1f} µs of the "
        f"server per token, {row['tokens_per_event']:.2f} tokens per event, first after {row['first_p50_ms']:.1f} ms "
        f"(p50){ratio}"
    )


async def _measure(
    options: Options, folder: Path, add: Callable[[dict[str, Any]], None], progress: Callable[[str], None]
) -> None:
    progress("Creating the model.")
    await asyncio.to_thread(write_model, options.model, folder / "model", options.device, options.engine_arguments)
    shape = Shape(options.prompt_tokens, options.generated_tokens, options.concurrency, options.num_requests)
    engine = EngineOptions(
        ("none",), (0,), options.repeats, shape, 1, "engines",
        device=options.device, engine_arguments=options.engine_arguments,
    )  # fmt: skip
    for bound in options.bounds:
        progress(f"Starting an engine, {bound or 'any number of'} events per second.")
        spec = engine_spec("unified", folder / "model", AdapterSlots(1, 8, MODULES), engine, folder / f"engine-{bound}")
        spec = replace(spec, max_events_per_s=bound)
        async with running_engine(spec):
            [server] = [each.pid for each in read_reports(spec.report_dir) if each.process == "server"]
            await _load(options, spec.url, server, streamed=True, seed=0)  # connections, kernels
            for repeat in range(options.repeats):
                for streamed in (repeat % 2 == 0, repeat % 2 == 1):
                    row = await _load(options, spec.url, server, streamed=streamed, seed=1 + repeat)
                    add({"bound": bound, "repeat": repeat, "streamed": streamed, **row})


async def _load(options: Options, url: str, server: int, *, streamed: bool, seed: int) -> dict[str, Any]:
    """A closed loop; every prompt is new to the engine's prefix cache."""
    random = Random(f"{seed} {streamed}")
    body = {"model": "bench", "max_tokens": options.generated_tokens, "ignore_eos": True, "stream": streamed}
    bodies = [
        {**body, "prompt": [_FIRST_TOKEN_ID + random.randrange(_TOKEN_IDS) for _ in range(options.prompt_tokens)]}
        for _ in range(options.num_requests)
    ]
    answers: list[_Answer] = []
    process, now = psutil.Process(server), stopwatch()
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            while bodies:
                answers.append(await _ask(session, f"{url}/v1/completions", bodies.pop()))

        before = _cpu_s(process)
        async with asyncio.TaskGroup() as clients:
            for _ in range(options.concurrency):
                clients.create_task(client())
    took_s, cpu_s = now(), _cpu_s(process) - before
    tokens = options.num_requests * options.generated_tokens
    return {
        "requests_per_s": round(options.num_requests / took_s, 3),
        "server_us_per_token": round(1e6 * cpu_s / tokens, 2),
        "server_cores": round(cpu_s / took_s, 3),
        "tokens_per_event": round(tokens / sum(each.events for each in answers), 3),
        "first_p50_ms": round(1000 * quantile([each.first_s for each in answers], 0.5), 2),
    }


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> _Answer:
    """Raises SystemFailed."""
    now, first_s, content = stopwatch(), 0.0, b""
    try:
        async with session.post(url, json=body) as answer:
            async for part in answer.content.iter_any():
                first_s = first_s or now()
                content += part
            if not answer.ok:
                raise SystemFailed(f"the engine answers {answer.status}: {content[:300]!r}")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SystemFailed(f"a request failed: {error!r}") from error
    if body["stream"] and (not content.endswith(_DONE) or _ERROR in content):
        raise SystemFailed(f"a stream ends with {content[-300:]!r}")
    return _Answer(first_s, content.count(b"data: {") if body["stream"] else 1)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
