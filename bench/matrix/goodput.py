"""`prelude bench goodput`: the highest rate that each system holds within objectives, on the same number of GPUs.

Systems run one after the other, each alone on the GPUs, ours as whole clusters behind a router. A load of stock SGLang
takes turns between its engines, which costs it no router and balances them perfectly.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from bench.errors import BenchError, SystemFailed
from bench.load.document import probes_of
from bench.load.options import Load
from bench.load.run import find_highest_rate
from bench.load.summary import SLO_KEYS
from bench.load.sweep import Sweep, verdict
from bench.matrix.options import SYSTEMS
from bench.matrix.options import Options as MatrixOptions
from bench.matrix.plan import Cell
from bench.matrix.systems import Started, Starter, gpus_of
from bench.measuring import provenance
from bench.measuring.output import growing_json, require_folders
from bench.workloads.lengths import FixedLengths
from bench.workloads.workload import Workload

_SEED = 20_011  # added for each pair of objectives: prompts that no cache has seen
_WARM_UP = 64


@dataclass(frozen=True, slots=True)
class Options:
    """One run."""

    systems: tuple[str, ...] = ("stock", "unified", "pair")  # keys of bench.matrix.options.SYSTEMS
    objectives: tuple[dict[str, float], ...] = ({"ttft": 2000.0, "tpot": 200.0},)  # a sweep for each; ms
    adapters: int = 8  # in turn
    slots: int = 8
    prompt_tokens: int = 128
    generated_tokens: int = 16
    concurrency: int = 16  # four fifths of the requests that the KV cache of an engine has room for; more wait
    sweep: Sweep = field(default_factory=lambda: Sweep(least_probe_s=10.0, lowest=1 / 8))
    num_gpus: int = 1  # of each system
    model: str = "tiny"  # a key of bench.systems.models.MODELS
    lora_rank: int = 16
    device: str = "cpu"
    engine_arguments: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises BenchError."""
        if unknown := set(self.systems) - set(SYSTEMS):
            raise BenchError(f"--systems: there is no {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
        for slo_ms in self.objectives:
            if not slo_ms or set(slo_ms) - set(SLO_KEYS):
                raise BenchError(f"--objectives: each names some of {', '.join(SLO_KEYS)}, such as ttft:1000,tpot:20")
        sweep = self.sweep
        if sweep.first_rate > sweep.max_rate:
            raise BenchError(f"--first-rate {sweep.first_rate:g}: at most {sweep.max_rate:g} here")
        if not 0 < sweep.share <= 1:
            raise BenchError(f"--share {sweep.share:g}: above 0, at most 1")
        if not 0.001 <= sweep.precision < 1:
            raise BenchError(f"--precision {sweep.precision:g}: from 0.001 to below 1")
        for name in self.systems:
            self.matrix_of(name).check()

    def matrix_of(self, system: str) -> MatrixOptions:
        """What starts this system alone."""
        workload = Workload(
            "goodput", "", "", lengths=FixedLengths(self.prompt_tokens, self.generated_tokens),
            num_adapters=self.adapters, concurrency=self.concurrency,
        )  # fmt: skip
        return MatrixOptions(
            cells=(Cell(workload),), systems=(system,), slo_ms={}, duration_s=0.0, num_slots=self.slots,
            lora_rank=self.lora_rank, model=self.model, device=self.device, num_gpus=self.num_gpus, through="router",
            engine_arguments=self.engine_arguments, is_alone=True,
        )  # fmt: skip


QUICK = Options(
    systems=("unified",), adapters=2, slots=2, prompt_tokens=16, generated_tokens=4,
    sweep=Sweep(first_rate=8.0, share=0.9, precision=0.9, max_rate=16.0, least_probe_s=2.0, lowest=1.0),
)  # fmt: skip


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Sweep each system, print what held, write the file after each sweep; returns its content. Raises BenchError."""
    options.check()
    require_folders(json_path)
    rows: list[dict[str, Any]] = []
    document = {**provenance.head("goodput", command, asdict(options), options.device), "rows": rows}
    with growing_json(document, json_path, "after all sweeps") as write:

        def add(row: dict[str, Any]) -> None:
            rows.append(row)
            write()

        for name in options.systems:
            with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
                try:
                    asyncio.run(_measure(options, name, Path(folder), add, progress))
                except asyncio.CancelledError:
                    raise BenchError(f"stopped after {len(rows)} sweeps") from None
    return document


async def _measure(
    options: Options, name: str, folder: Path, add: Callable[[dict[str, Any]], None], progress: Callable[[str], None]
) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # stops the engines in order
    matrix = options.matrix_of(name)
    async with contextlib.AsyncExitStack() as stack:
        starter = Starter(matrix, folder, stack, gpus_of(matrix))
        base, [system] = await starter.start_all(progress)
        workload = replace(matrix.cells[0].workload, concurrency=None, vocabulary=base.vocabulary)
        for number, slo_ms in enumerate(options.objectives):
            row = await _swept(options, system, workload, slo_ms, 1 + _SEED * number, sys.stdout)
            add({**row, "max_total_tokens": starter.max_total_tokens})
            if row["ended"].startswith("stopped"):
                raise BenchError(f"{name}: {row['ended']}")
            objectives = ", ".join(f"{key} {limit:g} ms" for key, limit in slo_ms.items())
            progress(f"{name}: within {objectives}: {row['verdict']}")


async def _swept(
    options: Options, system: Started, workload: Workload, slo_ms: dict[str, float], seed: int, out: TextIO
) -> dict[str, Any]:
    load = Load(
        endpoint=system.endpoint,
        workload=workload,
        seed=seed,
        requests_per_s=options.sweep.first_rate,
        processes=0,  # as many as each rate needs
    )
    found, _, _ = await find_highest_rate(load, options.sweep, _WARM_UP, slo_ms, out)
    for probe in found.probes:
        if probe.summary["num_failed"] == probe.summary["num_requests"]:
            said = probe.summary["errors"]["most_frequent"][0]
            raise SystemFailed(f"{system.name}: every request failed: {said['kind']}: {said['detail']}")
    return {
        "system": system.name,
        "slo_ms": slo_ms,
        "best_requests_per_s": found.best,
        "is_bounded": found.is_bounded,
        "ended": found.ended,
        "verdict": verdict(found),
        "probes": probes_of(found),
    }
