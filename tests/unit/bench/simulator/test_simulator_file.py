"""docs/simulator.md has the fields that `prelude bench simulate --json` writes: all, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.simulator.outcome import Outcome
from bench.simulator.questions import layouts, losses, options, report, scale
from bench.simulator.run import simulate

PAGE = Path(__file__).parents[4] / "docs" / "simulator.md"
SMALL = options.Options(prompt_tokens=128, output_tokens=8, num_adapters=5, seconds=4.0, warm_up_s=0.5, gpus=2)
Document = dict[str, Any]


def described() -> tuple[set[str], dict[str, set[str]]]:
    """Fields of the file, and of rows: of all, of each question's, of the steps in `over_time`."""
    text = PAGE.read_text().split("\n## The file\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `?(\w+)`? \| (.*`.*) \|$", text, re.MULTILINE)
    return named(text.split("\n|")[0]), {of: named(fields) for of, fields in rows}


def named(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return simulate(SMALL.scenario(options.Pools(unified=1), 20.0), 1)


@pytest.fixture
def answered(outcome: Outcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Document:
    """The file of all questions. Each simulation has the same small outcome, since only names matter here."""
    for module in (options, layouts, losses, scale):
        monkeypatch.setattr(module, "simulate", lambda _scenario, _seed=1: outcome)
    monkeypatch.setattr(losses, "BEFORE_S", 4.0)
    monkeypatch.setattr(layouts, "PHASE_S", 0.1)
    report.run(tuple(report.QUESTIONS), SMALL, "prelude bench simulate", tmp_path / "s.json", lambda _line: None)
    return json.loads((tmp_path / "s.json").read_text())


def test_the_page_has_the_fields_of_the_file(answered: Document) -> None:
    of_file, fields = described()
    assert of_file == answered.keys()
    written = {name: {field for row in rows for field in row} for name, rows in answered["answers"].items()}
    assert written == {name: fields["all"] | fields[name] for name in report.QUESTIONS}
    for name in ("rack", "roles"):
        rows = answered["answers"][name]
        assert {field for row in rows for step in row["over_time"] for field in step} == fields["over_time"]
