"""The tables of docs/simulator.md have the fields that `prelude bench simulate --json` writes: all, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.simulator.outcome import Outcome
from bench.simulator.questions import layouts, losses, options, report, scale, sizes
from bench.simulator.run import simulate

PAGE = Path(__file__).parents[4] / "docs" / "simulator.md"
SMALL = options.Options(prompt_tokens=128, output_tokens=8, num_adapters=5, seconds=4.0, warm_up_s=0.5, gpus=2)
# The end of a field's name, and its unit. The first that fits.
UNITS = (
    (r".*requests_per(_cpu)?_s|goodput_per_s", "requests/s"),
    (r".*events_per_cpu_s", "events/s"),
    (r"(.*_)?t[tp][fo]t_ms(_p\d+)?", "ms"),
    (r"(.*_)?s(_p\d+)?|seconds", "s"),
    (r"(.*_)?share(_.*)?", "share"),
    (r"(.*_)?tokens", "tokens"),
    (r".*_mib", "MiB"),
)
Document = dict[str, Any]


def table(first: str) -> list[list[str]]:
    """The cells of the rows of the page's table whose head begins so."""
    (found,) = re.findall(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in found.splitlines()]


def names(cell: str) -> list[str]:
    return re.findall(r"`([\w.-]+)`", cell)


def fields(first: str) -> set[str]:
    return {name for row in table(first) for name in names(row[0])}


def fields_of_rows() -> dict[str, set[str]]:
    """By question."""
    found: dict[str, set[str]] = {question: set() for question in report.QUESTIONS}
    for row in table("field of a row"):
        of = set(names(row[2]))
        assert of <= found.keys()
        for question in found.keys() - of if row[2].startswith("all") else of:
            assert not found[question] & set(names(row[0])), f"twice of {question}: {row[0]}"
            found[question].update(names(row[0]))
    return found


def fields_in(row: Document) -> Iterator[str]:
    """A list of objects is no field, but each of its objects' fields is."""
    for name, value in row.items():
        if isinstance(value, list):
            yield from (f"{name}.{inner}" for each in value for inner in each)
        else:
            yield name


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return simulate(SMALL.scenario(options.Pools(unified=1), 20.0), 1)


@pytest.fixture
def answered(outcome: Outcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Document:
    """The file of all questions. Each simulation has the same small outcome, since only names matter here."""
    for module in (options, sizes, layouts, losses, scale):
        monkeypatch.setattr(module, "simulate", lambda _scenario, _seed=1: outcome)
    monkeypatch.setattr(losses, "BEFORE_S", 4.0)
    monkeypatch.setattr(layouts, "PHASE_S", 0.1)
    report.run(tuple(report.QUESTIONS), SMALL, "prelude bench simulate", tmp_path / "s.json", lambda _line: None)
    return json.loads((tmp_path / "s.json").read_text())


def test_the_page_has_the_fields_of_the_answers(answered: Document) -> None:
    assert answered.keys() == fields("field of every file") | {"answers"}
    assert answered["settings"].keys() == fields("field of `settings`")
    written = {name: {field for row in rows for field in fields_in(row)} for name, rows in answered["answers"].items()}
    assert written == fields_of_rows()


@pytest.mark.parametrize("first", ["field of `settings`", "field of a row"])
def test_units_on_the_page_are_those_of_the_names(first: str) -> None:
    found = {name: row[1] for row in table(first) for name in names(row[0])}
    for name, unit in found.items():
        wanted = next((each for ending, each in UNITS if re.fullmatch(ending, name.rpartition(".")[2])), unit)
        assert unit == wanted, name
