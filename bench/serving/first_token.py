"""Benchmark of the time to first token of single prompts: a prefill/decode pair beside a unified worker.

Each layout is a whole cluster with its router. All run at the same time and read the same prompts in turn, so that what
slows the machine slows all. Engines say how long each stage of their requests took; with two GPUs, a pair has one for
each role, and a unified worker shares the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.errors import BenchError, SystemFailed
from bench.measuring import provenance
from bench.measuring.output import growing_json, require_folders
from bench.measuring.quantile import quantile
from bench.measuring.stage_times import SGLANG_STAGES, Stages, means_ms, stages_at
from bench.serving.single_prompts import SinglePrompts, small_cluster
from bench.systems.models import write_model
from cluster.agent.engine_metrics import FRESH_S
from cluster.config.schema import ClusterConfig
from cluster.errors import StartError
from cluster.local.supervisor import LocalCluster, local_cluster

LAYOUTS = ("pair", "unified")
_WARM_UP = 4
_ROOM = 16  # prompts that an engine's KV cache has room for


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    layouts: tuple[str, ...] = LAYOUTS
    prompt_tokens: tuple[int, ...] = (64, 512)
    requests: int = 20  # of each length, at each layout
    num_gpus: int = 1  # that the pair is spread over
    model: str = "tiny"  # a key of bench.systems.models.MODELS
    device: str = "cpu"
    engine_arguments: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises BenchError."""
        if not self.layouts or set(self.layouts) - set(LAYOUTS):
            raise BenchError(f"--layouts {','.join(self.layouts)}: there are {', '.join(LAYOUTS)}")


QUICK = Options(prompt_tokens=(32,), requests=3)


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print the medians and the stages, write the file; returns its content. Raises BenchError."""
    options.check()
    require_folders(json_path)
    rows: list[dict[str, Any]] = []
    document = {**provenance.head("first-token", command, asdict(options), options.device), "rows": rows}
    with (
        growing_json(document, json_path, "after all prompts") as write,
        tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder,
    ):

        def add(row: dict[str, Any]) -> None:
            rows.append(row)
            write()
            _show(row, progress)

        try:
            asyncio.run(_measure(options, Path(folder), add, progress))
        except StartError as error:
            raise SystemFailed(str(error)) from error
    return document


def _show(row: dict[str, Any], progress: Callable[[str], None]) -> None:
    progress(
        f"{row['prompt_tokens']} tokens, {row['layout']}: first token after {row['first_token_p50_ms']:.1f} ms (p50)"
    )
    for worker, stages in row["stages_ms"].items():
        progress(f"  {worker}: " + ", ".join(f"{stage} {mean_ms:.1f}" for stage, mean_ms in stages.items()) + " ms")


async def _measure(
    options: Options, folder: Path, add: Callable[[dict[str, Any]], None], progress: Callable[[str], None]
) -> None:
    progress("Creating the model.")
    await asyncio.to_thread(write_model, options.model, folder / "model", options.device, options.engine_arguments)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        clusters = {}
        for layout in options.layouts:
            progress(f"Starting {layout}.")
            config = config_of(options, layout, folder)
            clusters[layout] = await stack.enter_async_context(local_cluster(config, folder / f"logs-{layout}"))
        for length in options.prompt_tokens:
            # A seed for each length: a prompt must not begin as a shorter one did, which is cached.
            count = _WARM_UP + options.requests
            prompts = {layout: SinglePrompts(clusters[layout].url, length, count, seed=length) for layout in clusters}
            times: dict[str, list[float]] = defaultdict(list)
            before: dict[str, dict[str, Stages]] = {}
            for number in range(count):
                for layout, cluster in clusters.items():
                    if number == _WARM_UP:
                        before[layout] = await _stages(session, cluster)
                    times[layout].append(await prompts[layout].first_token_ms())
            for layout, cluster in clusters.items():
                measured, after = times[layout][_WARM_UP:], await _stages(session, cluster)
                add(
                    {
                        "prompt_tokens": length,
                        "layout": layout,
                        "first_token_p50_ms": round(quantile(measured, 0.5), 2),
                        "first_token_ms": [round(value, 2) for value in measured],
                        "stages_ms": {name: means_ms(before[layout][name], after[name]) for name in after},
                    }
                )


async def _stages(session: aiohttp.ClientSession, cluster: LocalCluster) -> dict[str, Stages]:
    """By worker."""
    await asyncio.sleep(FRESH_S)  # agents keep a page for so long
    return {
        name: await stages_at(
            session, name, f"http://{worker.host}:{worker.metrics_port}/engine/metrics", SGLANG_STAGES
        )
        for name, worker in cluster.config.workers.items()
    }


def config_of(options: Options, layout: str, folder: Path) -> ClusterConfig:
    """A cluster of one layout, with room for some prompts."""
    gpus = {"gpus": 1} if options.num_gpus > 1 else {}
    workers = (
        {"prefill-0": {"role": "prefill", **gpus}, "decode-0": {"role": "decode", **gpus}}
        if layout == "pair"
        else {"unified-0": {"role": "unified", **gpus}}
    )
    return small_cluster(
        folder,
        workers,
        device=options.device,
        max_total_tokens=_ROOM * max(options.prompt_tokens),
        engine_arguments=options.engine_arguments,
        name=layout,
    )
