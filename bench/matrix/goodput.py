"""`prelude bench goodput`: the highest rate that each system holds within objectives, in each layout.

Each system starts once per layout, alone on its GPUs, and is measured with every shape and under every pair of
objectives; those share their probes. Prelude runs as a whole cluster behind its router.
Stock engines take requests in turn: each gets as many, no router costs them anything, and nobody looks at their queues.
"""

import asyncio
import contextlib
import itertools
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.errors import BenchError, OptionInvalid, SystemFailed
from bench.load.document import probes_of
from bench.load.options import Load
from bench.load.run import Tried, find_highest_rate
from bench.load.summary import SLO_KEYS
from bench.load.sweep import Found, Sweep, verdict
from bench.matrix.options import Options as MatrixOptions
from bench.matrix.systems import Starter, gpus_of
from bench.measuring import provenance
from bench.measuring.output import require_folder, write_json
from bench.systems.layout import Layout
from bench.workloads.lengths import FixedLengths
from bench.workloads.workload import Workload

_SEED = 20_011  # added for each shape: prompts that no cache has seen
_WARM_UP = 64
# What a layout of unified workers runs in bench.matrix.options.SYSTEMS, and one of prefill and decode workers.
SYSTEMS = {"none": ("none", "none"), "stock": ("stock", "stock_pd"), "prelude": ("unified", "pair")}


@dataclass(frozen=True, slots=True)
class Options:
    """One run."""

    systems: tuple[str, ...] = ("stock", "prelude")  # keys of SYSTEMS
    layouts: tuple[Layout, ...] = (Layout(unified=1), Layout(prefill=1, decode=1))
    shapes: tuple[tuple[int, int], ...] = ((128, 16),)  # tokens of prompts and answers
    objectives: tuple[dict[str, float], ...] = ({"ttft": 2000.0, "tpot": 200.0},)  # a sweep for each; ms
    adapters: int = 8  # in turn
    slots: int = 8
    concurrency: int = 16  # four fifths of the requests that the KV cache of an engine has room for; more wait
    first_rates: tuple[float, ...] = (1.0,)  # requests/s that sweeps begin with: one for all, or one for each shape
    sweep: Sweep = field(default_factory=lambda: Sweep(least_probe_s=10.0, lowest=1 / 8))
    chunk_tokens: int = 2048  # of prompts per prefill batch, as `prelude init` writes it
    model: str = "tiny"  # a key of bench.systems.models.MODELS
    lora_rank: int = 16
    device: str = "cpu"
    engine_arguments: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises BenchError."""
        if unknown := set(self.systems) - set(SYSTEMS):
            raise OptionInvalid(f"--systems: there is no {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
        for layout in self.layouts:
            if layout.prefill and layout.unified and set(self.systems) != {"prelude"}:
                raise OptionInvalid(f"--layouts {layout}: only Prelude's router mixes unified workers with pairs")
        for slo_ms in self.objectives:
            if not slo_ms or set(slo_ms) - set(SLO_KEYS):
                raise OptionInvalid(
                    f"--objectives: each names some of {', '.join(SLO_KEYS)}, such as ttft:1000,tpot:20"
                )
        if len(self.first_rates) not in (1, len(self.shapes)):
            raise OptionInvalid(
                f"--first-rate: {len(self.first_rates)} rates for {len(self.shapes)} shapes; give one or as many"
            )
        if (highest := max(self.first_rates)) > self.sweep.max_rate:
            raise OptionInvalid(f"--first-rate {highest:g}: at most {self.sweep.max_rate:g} here")
        self.sweep.check()
        for name, layout in itertools.product(self.systems, self.layouts):
            self.matrix_of(name, layout).check()

    def workload(self, shape: tuple[int, int]) -> Workload:
        """Prompts and answers of a shape, adapters in turn."""
        return Workload(
            "goodput", "", "", lengths=FixedLengths(*shape), num_adapters=self.adapters, concurrency=self.concurrency
        )

    def matrix_of(self, system: str, layout: Layout) -> MatrixOptions:
        """What starts this system alone."""
        return MatrixOptions(
            cells=tuple(self.workload(shape) for shape in self.shapes),
            systems=(SYSTEMS[system][bool(layout.prefill)],), slo_ms={}, duration_s=0.0, num_slots=self.slots,
            lora_rank=self.lora_rank, model=self.model, device=self.device,
            num_gpus=1 if self.device == "cpu" else len(layout.roles), layout=layout, chunk_tokens=self.chunk_tokens,
            through="router", engine_arguments=self.engine_arguments,
        )  # fmt: skip


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Sweep each system, print what held, write the file after each sweep; returns its content. Raises BenchError."""
    options.check()
    require_folder(json_path)
    rows: list[dict[str, Any]] = []
    document = {**provenance.head("goodput", command, _settings(options), options.device), "rows": rows}

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        write_json(document, json_path)

    for name, layout in itertools.product(options.systems, options.layouts):
        with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
            try:
                asyncio.run(_measure(options, name, layout, Path(folder), add, progress))
            except asyncio.CancelledError:
                raise BenchError(f"stopped after {len(rows)} sweeps") from None
    return document


def _settings(options: Options) -> dict[str, Any]:
    return {**asdict(options), "layouts": [str(each) for each in options.layouts]}


async def _measure(
    options: Options, name: str, layout: Layout, folder: Path, add: Callable[[dict[str, Any]], None],
    progress: Callable[[str], None],
) -> None:  # fmt: skip
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # stops the engines in order
    matrix = options.matrix_of(name, layout)
    async with contextlib.AsyncExitStack() as stack:
        starter = Starter(matrix, folder, stack, gpus_of(matrix))
        base, started = await starter.start_all(progress)
        for number, shape in enumerate(options.shapes):
            first_rate = options.first_rates[number % len(options.first_rates)]
            load = Load(
                endpoint=started[matrix.systems[0]],
                workload=replace(options.workload(shape), concurrency=None, vocabulary=base.vocabulary),
                seed=1 + _SEED * number,
                requests_per_s=first_rate,  # each probe has its own
                processes=0,  # as many as each rate needs
            )
            about = {
                "system": name,
                "layout": str(layout),
                "prompt_tokens": shape[0],
                "generated_tokens": shape[1],
                "max_total_tokens": starter.max_total_tokens,
            }
            await _sweep(load, about, options.objectives, replace(options.sweep, first_rate=first_rate), add, progress)


async def _sweep(
    load: Load, about: dict[str, Any], objectives: tuple[dict[str, float], ...], sweep: Sweep,
    add: Callable[[dict[str, Any]], None], progress: Callable[[str], None],
) -> None:  # fmt: skip
    """One load, with a sweep for each pair of objectives. Raises BenchError."""
    name, tried = about["system"], list[Tried]()
    for slo_ms in objectives:
        found = await find_highest_rate(load, sweep, _WARM_UP, slo_ms, sys.stdout, tried)
        _require_answers(name, found)
        add(
            {
                **about,
                "slo_ms": slo_ms,
                "best_requests_per_s": found.best,
                "is_bounded": found.is_bounded,
                "ended": found.ended,
                "verdict": verdict(found),
                "probes": probes_of(found),
            }
        )
        if found.ended.startswith("stopped"):
            raise BenchError(f"{name}: {found.ended}")
        limits = ", ".join(f"{key} {limit:g} ms" for key, limit in slo_ms.items())
        shape = f"{about['prompt_tokens']}+{about['generated_tokens']}"
        progress(f"{name} {about['layout']}, {shape}, within {limits}: {verdict(found)}")


def _require_answers(name: str, found: Found) -> None:
    """Raises SystemFailed."""
    for probe in found.probes:
        if probe.summary["num_failed"] == probe.summary["num_requests"]:
            said = probe.summary["errors"]["most_frequent"][0]
            raise SystemFailed(f"{name}: every request failed: {said['kind']}: {said['detail']}")
