"""Trains the grid in processes side by side, and writes what there is after each training."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from adapters.model.normal_form import POSITIONS
from bench.errors import BenchError
from bench.measuring import provenance
from bench.measuring.output import require_folders, write_json
from bench.positions import arms
from bench.positions.compared import compared, means
from bench.positions.grid import ARMS, KIND_TASKS, Job, Options, best_rates, jobs, trials
from training.runs.base import check_device, weights_digest

Progress = Callable[[str], None]
Work = Callable[[], list[dict[str, Any]]]

_CELL = ("task", "kind", "rank", "seed")
_CORES_A_PROCESS = 2
_NOT_COMPARED = (
    "processes",
    "time_limit_s",
    "resume",
    "tasks",
    "arms",
    "kinds",
    "ranks",
    "num_seeds",
)  # of continued results


def run(options: Options, command: str, json_path: Path | None, progress: Progress) -> dict[str, Any]:
    """Train, ask and compare; print each row, and write all of them after each training.

    A run that is over its time limit ends with what it has. Raises BenchError and TrainingError.
    """
    require_folders(json_path)
    if options.resume and json_path is None:
        raise BenchError("--resume continues the result of --json; name it")
    check_device(options.device)
    deadline = None if options.time_limit_s is None else time.monotonic() + options.time_limit_s
    settings = json.loads(json.dumps({**asdict(options), "dtype": options.dtype}, default=lambda path: path.name))
    head = provenance.head("positions", command, settings, options.device)
    head |= {"base_model": weights_digest(options.model)}
    earlier = _earlier(json_path, head) if options.resume and json_path is not None else {}
    document = {
        **head,
        "parts": [
            *earlier.get("parts", ()),
            {"commit": head["commit"], "hardware": head["hardware"], "num_trained": 0},
        ],
        "ended": "early",
        "rates": earlier.get("rates", []),
        "chosen_rates": {kind: dict.fromkeys(POSITIONS, options.learning_rate) for kind in options.kinds},
        "rows": earlier.get("rows", []),
    }
    with _Processes(options, deadline) as processes:
        if options.learning_rate is None:
            known = {
                tuple(each[key] for key in ("kind", "positions", "learning_rate", "task")) for each in document["rates"]
            }
            tried = [each for each in trials(options) if tuple(asdict(each).values()) not in known]
            for found in processes.results([partial(arms.try_rate, each, options) for each in tried]):
                document["rates"] += found
                _told(document, processes.failed, json_path, progress, found)
            document["chosen_rates"] = best_rates(document["rates"])
        wanted = jobs(options, document["chosen_rates"])
        document["num_jobs"] = len(wanted)
        missing = [job for job in wanted if not _has(document["rows"], job)]
        for found in processes.results([partial(arms.run_job, job, options) for job in missing]):
            places = {_place(row) for row in found}
            kept = [row for row in document["rows"] if _place(row) not in places]
            document["rows"] = sorted([*kept, *found], key=_place)
            document["parts"][-1]["num_trained"] += 1
            _told(document, processes.failed, json_path, progress, found)
        document["ended"] = "time limit" if processes.is_over else "done"
    _told(document, processes.failed, json_path, progress, ())
    for line in (*document["compared"], *document["means"]):
        progress(json.dumps(line))
    if processes.failed:
        raise BenchError(f"{len(processes.failed)} trainings failed; the first: {processes.failed[0]}")
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
        progress(f"{document['parts'][-1]['num_trained']} trained, {len(failed)} failed {json.dumps(each)}")


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*(row[key] for key in _CELL), ARMS.index(row["arm"]))


def _has(rows: Sequence[Mapping[str, Any]], job: Job) -> bool:
    wanted = {_place({**asdict(job.cell), "arm": arm}) for arm in job.arms}
    return wanted <= {_place(row) for row in rows}


def _earlier(path: Path, head: Mapping[str, Any]) -> dict[str, Any]:
    """The result that is continued. Raises BenchError for one that this run would not have made."""
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text())
        pairs = {"base model": (document["base_model"], head["base_model"])}
        pairs |= {
            name: (document["settings"][name], now)
            for name, now in head["settings"].items()
            if name not in _NOT_COMPARED
        }
        found = {name: list(document[name]) for name in ("parts", "rates", "rows")}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{path} cannot be continued ({type(error).__name__}: {error}); name another file") from error
    for name, (before, now) in pairs.items():
        if before != now:
            raise BenchError(f"{path}: the {name} was {before!r:.80} and is {now!r:.80} now; name another file")
    return found


class _Processes:
    """Processes that work side by side until a deadline. They are ended with the context."""

    def __init__(self, options: Options, deadline: float | None) -> None:
        cores = len(os.sched_getaffinity(0))
        count = options.processes or max(cores // _CORES_A_PROCESS, 1)
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        numbers = context.SimpleQueue()
        for number in range(count):
            numbers.put(number)
        self._folder = tempfile.TemporaryDirectory(
            prefix="prelude-bench-", ignore_cleanup_errors=True
        )  # processes that are ended leave files
        begun = (options.device, numbers, max(cores // count, 1), self._folder.name)
        self._pool = ProcessPoolExecutor(count, context, initializer=arms.begin, initargs=begun)
        self._deadline, self.is_over = deadline, False
        self.failed: list[str] = []  # what trainings raised
        self._others = set(multiprocessing.active_children())

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_failure: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - self._others:  # what they do now nobody wants any more
            child.terminate()
        self._pool.shutdown()
        self._folder.cleanup()

    def results(self, work: Sequence[Work]) -> Iterator[list[dict[str, Any]]]:
        """Of each, as they end; `is_over` when the deadline came first. One that fails leaves the others alone."""
        waiting: set[Future[list[dict[str, Any]]]] = {self._pool.submit(each) for each in work if not self.is_over}
        while waiting:
            left_s = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
            done, waiting = wait(waiting, left_s, FIRST_COMPLETED)
            if not done:
                self.is_over = True
                return
            for each in done:
                error = each.exception()
                if isinstance(error, BrokenProcessPool):  # nothing more will come
                    raise BenchError(f"a process was killed ({error}); with fewer --processes each has more memory")
                if error is None:
                    yield each.result()
                else:
                    self.failed.append(f"{type(error).__name__}: {error}"[:500])
