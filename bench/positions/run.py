"""Trains the grid in processes side by side, and writes what there is after each training."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from adapters.model.base_weights import weights_digest
from adapters.model.normal_form import POSITIONS
from bench.errors import BenchError
from bench.measuring import provenance
from bench.measuring.output import require_folders, write_json
from bench.positions import arms
from bench.positions.compared import compared, means
from bench.positions.grid import ARMS, KIND_TASKS, Options, best_rates, jobs, trials
from training.runs.base import check_device

Progress = Callable[[str], None]
Work = Callable[[], list[dict[str, Any]]]

_CORES_A_PROCESS = 2


def run(options: Options, command: str, json_path: Path | None, progress: Progress) -> dict[str, Any]:
    """Train, ask and compare; print each row, and write all of them after each training.

    Raises BenchError and TrainingError.
    """
    require_folders(json_path)
    check_device(options.device)
    settings = json.loads(json.dumps({**asdict(options), "dtype": options.dtype}, default=lambda path: path.name))
    document: dict[str, Any] = {
        **provenance.head("positions", command, settings, options.device),
        "base_model": weights_digest(options.model),
        "num_trained": 0,
        "ended": "early",
        "rates": [],
        "chosen_rates": {kind: dict.fromkeys(POSITIONS, options.learning_rate) for kind in options.kinds},
        "rows": [],
    }
    with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder, _processes(options, folder) as pool:
        failed: list[str] = []
        if options.learning_rate is None:
            for found in _results(pool, [partial(arms.try_rate, each, options) for each in trials(options)], failed):
                document["rates"] += found
                _told(document, failed, json_path, progress, found)
            document["chosen_rates"] = best_rates(document["rates"])
        wanted = jobs(options, document["chosen_rates"])
        document["num_jobs"] = len(wanted)
        for found in _results(pool, [partial(arms.run_job, job, options) for job in wanted], failed):
            document["rows"] = sorted([*document["rows"], *found], key=_place)
            document["num_trained"] += 1
            _told(document, failed, json_path, progress, found)
    document["ended"] = "done"
    _told(document, failed, json_path, progress, ())
    for line in (*document["compared"], *document["means"]):
        progress(json.dumps(line))
    if failed:
        raise BenchError(f"{len(failed)} trainings failed; the first: {failed[0]}")
    return document


def _told(
    document: dict[str, Any],
    failed: Sequence[str],
    path: Path | None,
    progress: Progress,
    found: Iterable[Mapping[str, Any]],
) -> None:
    document["failed"] = list(failed)
    document["compared"] = compared(document["rows"])
    document["means"] = means(document["rows"], [name for name in KIND_TASKS if name in document["settings"]["tasks"]])
    write_json(document, path)
    for each in found:
        progress(f"{document['num_trained']} trained, {len(failed)} failed {json.dumps(each)}")


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["task"], row["kind"], row["rank"], row["seed"], ARMS.index(row["arm"])


def _processes(options: Options, folder: str) -> ProcessPoolExecutor:
    """Processes that train side by side and keep their files in the folder."""
    cores = len(os.sched_getaffinity(0))
    count = options.processes or max(cores // _CORES_A_PROCESS, 1)
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    numbers = context.SimpleQueue()
    for number in range(count):
        numbers.put(number)
    begun = (options.device, numbers, max(cores // count, 1), folder)
    return ProcessPoolExecutor(count, context, initializer=arms.begin, initargs=begun)


def _results(pool: ProcessPoolExecutor, work: Sequence[Work], failed: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Of each, as they end. One that fails leaves the others alone. Raises BenchError if a process was killed."""
    waiting = [pool.submit(each) for each in work]
    try:
        for done in as_completed(waiting):
            error = done.exception()
            if isinstance(error, BrokenProcessPool):  # nothing more will come
                raise BenchError(f"a process was killed ({error}); with fewer --processes each has more memory")
            if error is None:
                yield done.result()
            else:
                failed.append(f"{type(error).__name__}: {error}"[:500])
    finally:
        for each in waiting:
            each.cancel()
