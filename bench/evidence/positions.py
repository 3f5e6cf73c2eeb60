"""Tables of docs/positions.md: adapters of all positions and of the prompt alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from bench.evidence.cells import fixed, markdown, result
from bench.measuring.result_file import ResultFile
from bench.positions.compared import interval, means
from bench.positions.grid import (
    ALL,
    ARMS,
    AS_PREFILL,
    CONVERTED,
    KIND_TASKS,
    LENGTH_TASKS,
    MAIN_RANK,
    PREFILL,
    PREFILL_LONGER,
    RANK_TASKS,
)

_FILE = result("positions-h200x2.json")
_NAMES = {
    ALL: "all positions",
    AS_PREFILL: "all, applied to the prompt",
    PREFILL: "prompt only",
    PREFILL_LONGER: "prompt only, 3 × the steps",
    CONVERTED: "converted",
}
_KINDS = {"lora": "LoRA", "direft": "DiReFT"}

Line = dict[str, Any]


def exact() -> str:
    """Exact answers of all six kinds of task at the rank that all have, and their mean where no arm is missing."""
    rows = []
    for kind, name in _KINDS.items():
        of_tasks = {task: lines for task in KIND_TASKS if (lines := _lines(task, kind))}
        for task, lines in of_tasks.items():
            rows.append((f"{name}, {task}", *(_interval(lines.get(arm), "exact") for arm in ARMS)))
        whole = [task for task, lines in of_tasks.items() if lines.keys() == set(ARMS)]
        of_rank = [row for row in _FILE.document["rows"] if (row["kind"], row["rank"]) == (kind, MAIN_RANK)]
        if of_arms := {line["arm"]: line for line in means(of_rank, whole)} if whole else {}:
            cells = (_interval(of_arms.get(arm), "exact") for arm in ARMS)
            rows.append((f"**{name}, mean of {len(whole)}**", *cells))
    return f"{markdown((f'exact answers, rank {MAIN_RANK}', *_NAMES.values()), rows)}\n\n{_settings()}"


def lengths() -> str:
    """Exact answers over the length of the right ones, and how long those are that are given."""
    rows = []
    for task in LENGTH_TASKS:
        if lines := _lines(task, "lora"):
            tokens = next(iter(lines.values()))["right_tokens"]["mean"]
            rows.append((f"{fixed(tokens, 0)} tokens", *(_interval(lines.get(arm), "exact") for arm in ARMS)))
    by_length = markdown((f"exact answers, LoRA rank {MAIN_RANK}", *_NAMES.values()), rows)
    return f"{by_length}\n\n{_given()}"


def variants() -> str:
    """Of LoRA what the main table leaves open: as many steps, the same rate, other ranks, a longer answer."""
    ranks, long = result("positions-h200x2-ranks.json"), result("positions-h200x2-long-answers.json")
    steps, rate = (result(f"positions-h200x2-all-{name}.json") for name in ("120-steps", "at-the-prompts-rate"))
    short = [task for task in KIND_TASKS if task != "long"]
    rows = [
        ("120 steps each, five tasks", _mean(steps, ALL, short), _mean(_FILE, PREFILL_LONGER, short), ""),
        ("one rate, 0.0045, five tasks", _mean(rate, ALL, short), _mean(_FILE, PREFILL, short), ""),
        *(
            (f"rank {rank}, three tasks", *(_mean(ranks, arm, RANK_TASKS, rank) for arm in (ALL, PREFILL, CONVERTED)))
            for rank in (4, 64)
        ),
        ("111 tokens, one rate, 0.0045", *(_mean(long, arm, ["lines-10"]) for arm in (ALL, PREFILL, CONVERTED))),
    ]
    return markdown(("exact answers, LoRA", *(_NAMES[arm] for arm in (ALL, PREFILL, CONVERTED))), rows)


def _mean(file: ResultFile, arm: str, tasks: Sequence[str], rank: int = MAIN_RANK) -> str:
    """Over the tasks, with the interval over seeds that have them all."""
    of_seeds: dict[int, list[float]] = {}
    for row in file.document["rows"]:
        if row["task"] in tasks and (row["arm"], row["kind"], row["rank"]) == (arm, "lora", rank):
            of_seeds.setdefault(row["seed"], []).append(row["exact"])
    values = [fmean(exact) for exact in of_seeds.values() if len(exact) == len(tasks)]
    return _interval({"exact": interval(values), "num_seeds": len(values)}, "exact")


def _given() -> str:
    """Tokens given for each token of the right answers, and answers without an end."""
    rows = []
    for kind, name in _KINDS.items():
        of_tasks = [_lines(task, kind) for task in KIND_TASKS]
        cells = []
        for arm in ARMS:
            if not (lines := [each[arm] for each in of_tasks if arm in each]):
                cells.append("")
                continue
            given = fmean(each["answer_tokens"]["mean"] / each["right_tokens"]["mean"] for each in lines)
            cells.append(f"{given:.2f} ({100 * fmean(each['endless']['mean'] for each in lines):.1f} %)")
        if any(cells):
            rows.append((f"{name}, rank {MAIN_RANK}", *cells))
    return markdown(("tokens given / right (without an end)", *_NAMES.values()), rows)


def _settings() -> str:
    """What was run, on what."""
    document = _FILE.document
    chosen = document["settings"]
    chosen_rates = "; ".join(
        f"{_KINDS[kind]} {of['all']:g} for all positions, {of['prefill']:g} for the prompt"
        for kind, of in document["chosen_rates"].items()
    )
    num_trained = sum(part["num_trained"] for part in document["parts"])
    return (
        f"{_FILE.machine}, commit `{_FILE.commit}`, {chosen['dtype']}, {chosen['num_seeds']} seeds, "
        f"{chosen['num_steps']} steps of {chosen['batch_size']} rows; {num_trained} of {document['num_jobs']} "
        "trainings. Intervals are of 95 %, by Student's t over the seeds, cut off at 0 and 1. Learning rates: "
        f"{chosen_rates}."
    )


def _lines(task: str, kind: str) -> dict[str, Line]:
    """By arm, at the rank that all tasks have."""
    return {
        line["arm"]: line
        for line in _FILE.document["compared"]
        if (line["task"], line["kind"], line["rank"]) == (task, kind, MAIN_RANK)
    }


def _bounds(interval: Line) -> Sequence[float]:
    """(low, mean, high), within 0 and 1; without an interval the mean thrice."""
    mean = interval["mean"]
    low, high = (mean if interval[each] is None else interval[each] for each in ("low", "high"))
    return max(low, 0.0), mean, min(high, 1.0)


def _interval(line: Line | None, figure: str) -> str:
    if line is None:
        return ""
    low, mean, high = (fixed(each, 2) for each in _bounds(line[figure]))
    return mean if line["num_seeds"] < 2 else f"{mean} ({low}–{high})"
