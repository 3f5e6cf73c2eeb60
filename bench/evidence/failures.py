"""The results of the chaos and the soak benchmark as docs/evidence.md shows them. There may be none: both take long."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from bench.evidence.cells import RESULTS, markdown
from bench.measuring.result_file import ResultFile

_NONE = "No run is published yet."
_CHAOS_HEAD = (
    "layout", "killed or stopped", "in flight, by phase", "what they got", "longest", "requests meanwhile", "longest",
    "all ready after", "left behind",
)  # fmt: skip
_SOAK_HEAD = ("killed", "at", "failed", "last slow or failed request after", "p99 from 30 s on", "back to normal")
_USE_HEAD = ("process", "MiB, first and last quarter", "descriptors", "longest life", "MiB in it", "descriptors in it")


def chaos(path: Path = RESULTS / "chaos-cpu.json") -> str:
    """Sums, and a row for each case."""
    if not path.exists():
        return _NONE
    document = ResultFile(path).document
    return f"{chaos_sums(document)}\n\n{markdown(_CHAOS_HEAD, chaos_rows(document))}"


def soak(path: Path = RESULTS / "soak-cpu.json") -> str:
    """Sums, a row for each kill, and one for each process."""
    if not path.exists():
        return _NONE
    document = ResultFile(path).document
    kills, processes = markdown(_SOAK_HEAD, soak_rows(document)), markdown(_USE_HEAD, use_rows(document))
    return f"{soak_sums(document)}\n\n{kills}\n\n{processes}"


def chaos_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each case."""
    return [
        (
            row["layout"],
            f"{row['victim']}, {'kill -9' if row['signal'] == 'kill' else 'SIGSTOP'}",
            _counts({phase: sum(outcomes.values()) for phase, outcomes in row["phases"].items()}) or "none",
            _counts(row["outcomes"]),
            f"{row['longest_s']:.0f} s" if row["outcomes"] else "",
            _counts(row["probe_outcomes"]),
            f"{row['longest_probe_s']:.0f} s",
            f"{row['ready_s']:.0f} s",
            "; ".join(row["left_behind"]) or "nothing",
        )
        for row in document["rows"]
    ]


def chaos_sums(document: dict[str, Any]) -> str:
    """What must not be, over all cases."""
    found, deadline_s = document["summary"], document["settings"]["client_deadline_s"]
    return (
        f"{found['cases']} cases; the run ended {document['ended']}. Wrong answers: {found['wrong_answers']}. Requests "
        f"that hung for {deadline_s:g} s: {found['hung']}. Requests that failed although nothing of their answer had "
        f"been sent and another worker was there: {found['unsent_failed']}. Cases that left something behind: "
        f"{found['left_behind']}. Cases after which not all was ready: {found['not_ready']}."
    )


def soak_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each kill."""
    return [
        (
            kill["victim"],
            f"{kill['at_s']:.0f} s",
            _counts(kill["failed"]) or "none",
            f"{kill['last_slow_or_failed_s']:.0f} s",
            "" if kill["p99_after_30_s"] is None else f"{kill['p99_after_30_s']:.2f} s",
            {True: "yes", False: "no", None: "not known"}[kill["is_back"]],
        )
        for kill in document["kills"]
    ]


def use_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each process: the router, and each worker's agent and engine."""
    return [
        (
            name,
            _from_to(use["mib"]),
            _from_to(use["descriptors"]),
            f"{use['longest_life']['seconds']} s",
            _from_to(use["longest_life"]["mib"]),
            _from_to(use["longest_life"]["descriptors"]),
        )
        for name, use in document["processes"].items()
    ]


def soak_sums(document: dict[str, Any]) -> str:
    """Outcomes over the whole load, and how many kills were got over."""
    settings, kills = document["settings"], document["kills"]
    back = Counter(kill["is_back"] for kill in kills)
    return (
        f"{settings['minutes']:g} minutes at {settings['load']:.0%} of {document['capacity']:g} requests/s, "
        f"{settings['adapters']} adapters; the run ended {document['ended']}. {_counts(document['outcomes'])}. Wrong "
        f"answers: {document['wrong_answers']}; hung: {document['hung']}. p99 before the first kill "
        f"{document['p99_before_s']:.2f} s; of {len(kills)} kills, back to normal within 30 s: {back[True]}, not: "
        f"{back[False]}. Left behind: {'; '.join(document.get('left_behind', ['not looked at'])) or 'nothing'}."
    )


def _counts(counts: dict[str, int]) -> str:
    most_first = sorted(counts.items(), key=lambda each: -each[1])
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in most_first)


def _from_to(pair: list[float]) -> str:
    return f"{pair[0]:g} → {pair[1]:g}"
