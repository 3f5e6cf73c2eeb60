"""Asks the questions and writes their figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.measuring import provenance
from bench.measuring.output import require_folders, write_json
from bench.simulator.questions.layouts import ratios, roles
from bench.simulator.questions.losses import rack
from bench.simulator.questions.options import Options, Row, Say
from bench.simulator.questions.scale import scale

Question = Callable[[Options, Say], list[Row]]
QUESTIONS: dict[str, tuple[str, Question]] = {
    "rack": ("What happens when a rack dies?", rack),
    "ratios": ("Pairs or unified workers, and in which ratio?", ratios),
    "roles": ("Should workers change their role?", roles),
    "scale": ("How large a fleet can be simulated?", scale),
}


def run(
    asked: Sequence[str],
    options: Options,
    command: str,
    json_path: Path | None,
    say: Say,
) -> dict[str, Any]:
    """Answer the questions, print a line each, write the file; returns its content. Raises BenchError."""
    if unknown := set(asked) - set(QUESTIONS):
        raise BenchError(f"no question {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")
    require_folders(json_path)
    options.check()
    curves = options.worker
    say(f"{curves.name}: {curves.text}")
    document: dict[str, Any] = {
        **provenance.head("simulate", command, asdict(options)),
        "curves": {"name": curves.name, "text": curves.text, "sources": curves.sources},
        "answers": {},
    }
    for name in asked:
        text, question = QUESTIONS[name]
        say(text)
        document["answers"][name] = question(options, say)
        write_json(document, json_path)  # after each, since some take long
    return document


def quick(options: Options) -> Options:
    """A smoke test's: few requests."""
    return replace(options, requests_per_s=min(options.requests_per_s, 20.0), gpus=2, seconds=2.0, warm_up_s=0.5)
