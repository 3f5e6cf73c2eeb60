"""Benchmark of where an engine's time goes while it reads prompts, with and without an adapter.

One unified engine, and for the kind "plain" SGLang without hooks and adapter slots. First the client's time of single
prompts, kinds in turn, then SGLang's profiler over a few prompts of each kind: every GPU kernel's time, or on a CPU
every operator's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from adapters.model.base_model import MODULES, BaseModel
from bench.errors import BenchError, SystemFailed
from bench.measuring import provenance
from bench.measuring.output import growing_json, require_folders
from bench.options import DTYPE, Shape
from bench.options import Options as EngineOptions
from bench.systems.adapter_set import adapters_folder, prepare_adapters
from bench.systems.engines import engine_spec, load_adapters, running_engine
from bench.systems.models import write_model
from engine.arguments import AdapterSlots

KINDS = ("plain", "none", "lora", "direft")
_WARM_UP = 3
_TRACE_TIMEOUT_S = 120.0
_SHOWN = 12
_NAME_LENGTH = 120  # of a kernel's, which may be a C++ type


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    kinds: tuple[str, ...] = ("none", "lora")  # of KINDS
    prompt_tokens: tuple[int, ...] = (128,)
    timed: int = 10  # prompts of each kind and length, one at a time
    profiled: int = 4
    slots: int = 8
    lora_rank: int = 16
    reft_rank: int = 8
    model: str = "tiny"  # a key of bench.systems.models.MODELS
    device: str = "cpu"
    engine_arguments: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises BenchError."""
        if not self.kinds or set(self.kinds) - set(KINDS):
            raise BenchError(f"--kinds {','.join(self.kinds)}: there are {', '.join(KINDS)}")


QUICK = Options(timed=2, profiled=1, slots=2)


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print each kind's largest parts, write the file; returns its content. Raises BenchError."""
    options.check()
    require_folders(json_path)
    rows: list[dict[str, Any]] = []
    document = {**provenance.head("prompt-profile", command, asdict(options), options.device), "rows": rows}
    with growing_json(document, json_path, "after all prompts") as write, tempfile.TemporaryDirectory() as folder:

        def add(row: dict[str, Any]) -> None:
            rows.append(row)
            write()
            _show(row, progress)

        asyncio.run(_measure(options, Path(folder), add, progress))
    return document


def _show(row: dict[str, Any], progress: Callable[[str], None]) -> None:
    progress(
        f"{row['prompt_tokens']} tokens, {row['kind']}: {row['client_ms']:.2f} ms for the client, "
        f"{row['busy_ms']:.2f} ms in {row['unit']}s"
    )
    for part in row["parts"][:_SHOWN]:
        progress(f"  {part['ms']:9.3f} ms  {part['count']:7.1f} times  {part['name'][:80]}")


async def _measure(
    options: Options, folder: Path, add: Callable[[dict[str, Any]], None], progress: Callable[[str], None]
) -> None:
    progress("Creating the model and the adapters.")
    await asyncio.to_thread(write_model, options.model, folder / "model", options.device, options.engine_arguments)
    base = BaseModel.read(folder / "model")
    slots = AdapterSlots(options.slots, max(options.lora_rank, options.reft_rank), MODULES)
    shared = _engine_options(options)
    specs = {
        role: engine_spec(role, folder / "model", slots if role == "unified" else None, shared, folder / role)
        for role in dict.fromkeys(map(_role_of, options.kinds))
    }
    async with contextlib.AsyncExitStack() as stack:
        kept = stack.enter_context(adapters_folder(options.device, folder))
        revisions: dict[str, str | None] = {"plain": None, "none": None}
        serving = {}
        for kind, rank in (("lora", options.lora_rank), ("direft", options.reft_rank)):
            if kind in options.kinds:
                [made] = await asyncio.to_thread(
                    prepare_adapters, kind, rank, 1, base, DTYPE, kept, frozenset({"serving"})
                )
                revisions[kind], serving[made.revision_id] = made.revision_id, made.serving
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)))
        readers: dict[str, _Reader] = {}
        for role, spec in specs.items():
            progress(f"Starting the {role} engine.")
            await stack.enter_async_context(running_engine(spec))
            if role == "unified":
                await load_adapters(spec, serving)
            readers[role] = _Reader(session, spec.url, base.vocabulary)
        for length in options.prompt_tokens:
            seconds: dict[str, list[float]] = defaultdict(list)
            for repeat in range(_WARM_UP + options.timed):
                for kind in options.kinds:
                    took_s = await readers[_role_of(kind)].read(length, revisions[kind])
                    if repeat >= _WARM_UP:
                        seconds[kind].append(took_s)
            for kind in options.kinds:
                traces = folder / f"{length}-{kind}"
                await asyncio.to_thread(traces.mkdir)
                reader = readers[_role_of(kind)]
                events = await reader.profile(length, revisions[kind], options.profiled, traces, options.device)
                unit, parts = parts_of(events, options.profiled)
                add(
                    {
                        "prompt_tokens": length,
                        "kind": kind,
                        "client_ms": round(1000 * statistics.median(seconds[kind]), 3),
                        "busy_ms": round(sum(part["ms"] for part in parts), 3),
                        "unit": unit,
                        "parts": parts,
                    }
                )


def _role_of(kind: str) -> str:
    return "stock" if kind == "plain" else "unified"


def _engine_options(options: Options) -> EngineOptions:
    shape = Shape(max(options.prompt_tokens), 16, 8, 8)
    return EngineOptions(
        ("unified_lora",), (1,), 1, shape, options.slots, "engines", device=options.device,
        engine_arguments=options.engine_arguments,
    )  # fmt: skip


class _Reader:
    """Sends prompts that no cache has seen, for one token each."""

    def __init__(self, session: aiohttp.ClientSession, url: str, vocabulary: int) -> None:
        self._session, self._url = session, url
        self._random, self._vocabulary = Random(1), vocabulary

    async def read(self, length: int, revision_id: str | None) -> float:
        """Seconds until the answer."""
        prompt = [self._random.randrange(16, self._vocabulary) for _ in range(length)]
        body: dict[str, Any] = {"model": "bench", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        if revision_id is not None:
            body["lora_path"] = revision_id
        began_at = time.perf_counter()
        await self._post("/v1/completions", body)
        return time.perf_counter() - began_at

    async def profile(
        self, length: int, revision_id: str | None, count: int, folder: Path, device: str
    ) -> list[dict[str, Any]]:
        """The trace's events while it reads so many prompts."""
        activities = ["CPU"] if device == "cpu" else ["CPU", "GPU"]
        await self._post("/start_profile", {"output_dir": str(folder), "activities": activities})
        for _ in range(count):
            await self.read(length, revision_id)
        await self._post("/stop_profile", {})
        ends_at = time.monotonic() + _TRACE_TIMEOUT_S
        while time.monotonic() < ends_at:
            events = await asyncio.to_thread(_trace_in, folder)
            if events is not None:
                return events
            await asyncio.sleep(0.5)
        raise SystemFailed(f"SGLang's profiler wrote no trace within {_TRACE_TIMEOUT_S:g} s")

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        try:
            async with self._session.post(self._url + path, json=body) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SystemFailed(f"{path} got no answer: {error or type(error).__name__}") from error
        if answer.status != 200:
            raise SystemFailed(f"{path} answered {answer.status}: {text[:500]}")


def _trace_in(folder: Path) -> list[dict[str, Any]] | None:
    """The events of the trace in this folder; None while it is not there, or still being written."""
    for path in folder.glob("*.json.gz"):
        with contextlib.suppress(EOFError, ValueError, gzip.BadGzipFile), gzip.open(path) as file:
            return json.load(file)["traceEvents"]
    return None


def parts_of(events: Iterable[dict[str, Any]], num_prompts: int) -> tuple[str, list[dict[str, Any]]]:
    """What was measured, "kernel" or "operator", and the time of each by name, the largest first; per prompt.

    `events` are those of a trace of PyTorch's profiler, in microseconds. Without any GPU kernel these are CPU
    operators, each without those that it calls.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in complete if event.get("cat") == "kernel"]
    unit, durations = ("kernel", kernels) if kernels else ("operator", _own_times(complete))
    count: dict[str, int] = defaultdict(int)
    took_us: dict[str, float] = defaultdict(float)
    for event in durations:
        name = str(event["name"])[:_NAME_LENGTH]
        count[name] += 1
        took_us[name] += event["dur"]
    return unit, [
        {"name": name, "count": round(count[name] / num_prompts, 2), "ms": round(us / 1000 / num_prompts, 4)}
        for name, us in sorted(took_us.items(), key=lambda each: -each[1])
    ]


def _own_times(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """CPU operators with the time that is not in operators which they call: those nest, by thread."""
    own: list[dict[str, Any]] = []
    open_by_thread: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    operators = (event for event in events if event.get("cat") == "cpu_op")
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        made = {"name": event["name"], "dur": event["dur"], "end": event["ts"] + event["dur"]}
        callers = open_by_thread[event.get("tid")]
        while callers and callers[-1]["end"] <= event["ts"]:
            callers.pop()
        if callers:
            callers[-1]["dur"] -= event["dur"]
        callers.append(made)
        own.append(made)
    return own
