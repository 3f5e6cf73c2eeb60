"""Means over seeds with intervals, and what an arm is behind adapters that are trained and used at all positions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.positions.grid import ALL, ARMS

# Two-sided 95 % quantiles of Student's t by the number of seeds.
_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
FIGURES = ("exact", "near", "loss", "answer_tokens", "right_tokens", "endless", "steps", "seconds")

Interval = dict[str, float | None]


def interval(values: Sequence[float]) -> Interval:
    """The mean and, from two values on, its 95 % interval by Student's t, which takes them for normal."""
    mean = statistics.fmean(values)
    half = _T[len(values)] * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    low, high = (None, None) if half is None else (round(mean - half, 4), round(mean + half, 4))
    return {"mean": round(mean, 4), "low": low, "high": high}


def compared(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each task, kind, rank and arm; `behind`: exact answers fewer than those of `all`, seed by seed."""
    of_cells: dict[tuple[str, str, int], dict[str, dict[int, Mapping[str, Any]]]] = {}
    for row in rows:
        of_arms = of_cells.setdefault((row["task"], row["kind"], row["rank"]), {})
        of_arms.setdefault(row["arm"], {})[row["seed"]] = row
    lines = []
    for (task, kind, rank), of_arms in of_cells.items():
        for arm in ARMS:
            if not (of_seeds := of_arms.get(arm)):
                continue
            line: dict[str, Any] = {"task": task, "kind": kind, "rank": rank, "arm": arm, "num_seeds": len(of_seeds)}
            for name in FIGURES:
                line[name] = interval([row[name] for row in of_seeds.values()])
            both = sorted(of_seeds.keys() & of_arms.get(ALL, {}).keys())
            if both and arm != ALL:
                line["behind"] = interval([of_arms[ALL][each]["exact"] - of_seeds[each]["exact"] for each in both])
            lines.append(line)
    return lines


def means(rows: Iterable[Mapping[str, Any]], tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Of each kind, rank and arm the mean over these tasks, of seeds in which every arm has them all."""
    exact: dict[tuple[str, int], dict[int, dict[tuple[str, str], float]]] = {}
    for row in rows:
        if row["task"] in tasks:
            of_seed = exact.setdefault((row["kind"], row["rank"]), {}).setdefault(row["seed"], {})
            of_seed[row["arm"], row["task"]] = row["exact"]
    lines = []
    for (kind, rank), of_seeds in exact.items():
        whole = [each for each in of_seeds.values() if len(each) == len(tasks) * len(ARMS)]
        for arm in ARMS if whole else ():
            values = [statistics.fmean(each[arm, task] for task in tasks) for each in whole]
            lines.append({"kind": kind, "rank": rank, "arm": arm, "num_seeds": len(values), "exact": interval(values)})
    return lines
