"""Tables and chart of docs/positions.md: adapters of all positions and of the prompt alone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import fmean
from typing import Any

from adapters.model.normal_form import POSITIONS
from bench.evidence.cells import fixed, markdown, result
from bench.training.positions.compared import means
from bench.training.positions.grid import (
    ALL,
    ARMS,
    AS_PREFILL,
    CONVERTED,
    KIND_TASKS,
    LENGTH_TASKS,
    MAIN_RANK,
    PREFILL,
    PREFILL_LONGER,
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
_COLOURS = ("#3d8bd4", "#d9772f", "#3fa864", "#a35fce", "#c23b52")

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


def rates() -> str:
    """Validation loss over the learning rate: the mean of the tasks that try it."""
    losses: dict[tuple[str, str], dict[float, list[float]]] = {}
    for each in _FILE.document["rates"]:
        of_rates = losses.setdefault((each["kind"], each["positions"]), {})
        of_rates.setdefault(each["learning_rate"], []).append(each["loss"])
    rows = []
    for kind, name in _KINDS.items():
        for positions in POSITIONS:
            of_rates = losses[kind, positions]
            cells = (f"{rate:g}: {fixed(fmean(of_rates[rate]), 4)}" for rate in sorted(of_rates))
            rows.append((f"{name}, {'prompt only' if positions == 'prefill' else 'all positions'}", *cells))
    return markdown(("validation loss, nats a token", "lowest rate", "middle rate", "highest rate"), rows)


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


def chart() -> str:
    """An SVG file: a panel for each kind of adapter, its tasks side by side, arms as points with their intervals."""
    width, height, left, top, between = 760, 190, 44, 56, 44
    parts = []
    for panel, (kind, name) in enumerate(_KINDS.items()):
        begin = top + panel * (height + between)
        parts.append(f'<text x="{left}" y="{begin - 14}">{name}, rank {MAIN_RANK}: exact held-out answers</text>')
        for tick in (0, 0.25, 0.5, 0.75, 1):
            y = begin + (1 - tick) * (height - 24)
            parts.append(f'<line x1="{left}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        step = (width - left) / len(KIND_TASKS)
        for place, task in enumerate(KIND_TASKS):
            middle = left + (place + 0.5) * step
            parts.append(f'<text x="{middle:.1f}" y="{begin + height - 8}" text-anchor="middle">{task}</text>')
            for number, arm in enumerate(ARMS):
                if (line := _lines(task, kind).get(arm)) is None:
                    continue
                x = middle + (number - 2) * 17
                low, y, high = (begin + (1 - each) * (height - 24) for each in _bounds(line["exact"]))
                parts.append(
                    f'<g stroke="{_COLOURS[number]}" fill="{_COLOURS[number]}">'
                    f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(_NAMES[arm])}: '
                    f"{_interval(line, 'exact')}</title></circle></g>"
                )
    keys, x = [], left
    for colour, name in zip(_COLOURS, _NAMES.values(), strict=True):
        keys.append(f'<circle cx="{x + 4}" cy="14" r="4" fill="{colour}"/><text x="{x + 12}" y="18">{name}</text>')
        x += 24 + 6 * len(name)
    whole = top + 2 * height + between
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole}" role="img">'
        "<title>Exact held-out answers by kind of task, five ways to train and apply an adapter</title>"
        "<style>text{font:11px system-ui,sans-serif;fill:#808080}.grid{stroke:#80808040}g line{stroke-width:2}</style>"
        f"{''.join((*keys, *parts))}</svg>\n"
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
