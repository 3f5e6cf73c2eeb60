"""The measured tables of the pages are what bench/results/ gives."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import evidence
from bench.evidence import adapter_tax, cells, positions
from bench.evidence.cells import fixed
from bench.measuring.report import Measurement
from bench.measuring.result_file import ResultFile
from cli.main import _parser


@pytest.mark.parametrize("name", evidence.PAGES)
def test_the_page_is_what_the_results_give(name: str):
    page = (evidence.ROOT / name).read_text()
    assert page == evidence.rendered(page), "run: python -m bench.evidence"


@pytest.mark.parametrize("name", evidence.PLOTS)
def test_the_plot_is_what_the_results_give(name: str):
    assert (evidence.ROOT / name).read_text() == evidence.PLOTS[name](), "run: python -m bench.evidence"


def test_every_table_is_on_one_page():
    found = Counter(
        table for name in evidence.PAGES for table in evidence.tables_in((evidence.ROOT / name).read_text())
    )
    assert found == Counter(list(evidence.TABLES))


def test_a_number_that_no_file_has_is_replaced():
    page = "Before.\n<!-- table h200-rank1 -->\n| Prelude, LoRA rank 1 | 99.9 |\n<!-- end -->\nAfter.\n"
    assert "99.9" not in evidence.rendered(page)
    assert evidence.rendered(evidence.rendered(page)) == evidence.rendered(page)
    assert evidence.rendered(page).startswith("Before.\n<!-- table h200-rank1 -->\n\n| 8B, n = 512 |")
    assert evidence.rendered(page).endswith("\n\n<!-- end -->\nAfter.\n")


def test_an_unknown_table_is_an_error():
    with pytest.raises(KeyError):
        evidence.rendered("<!-- table nothing -->\n<!-- end -->\n")


def test_main_rewrites_only_pages_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    (tmp_path / "right.md").write_text(evidence.rendered("<!-- table catalog -->\n<!-- end -->\n"))
    (tmp_path / "old.md").write_text("<!-- table catalog -->\n| 1 s |\n<!-- end -->\n")
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "PAGES", ("right.md", "old.md"))
    (tmp_path / "right.svg").write_text("right")
    monkeypatch.setattr(evidence, "PLOTS", {"right.svg": lambda: "right", "new.svg": lambda: "new"})
    evidence.main()
    assert (tmp_path / "old.md").read_text() == (tmp_path / "right.md").read_text()
    assert (tmp_path / "new.svg").read_text() == "new"
    assert capsys.readouterr().err == "old.md updated\nnew.svg updated\n"


def test_numbers_are_rounded_half_up():
    assert [fixed(value, 2) for value in (1.125, 0.9448, 0.995, 2.0)] == ["1.13", "0.94", "1.00", "2.00"]
    assert fixed(18.63, 0) == "19"


def test_what_was_not_measured_leaves_its_cell_empty(monkeypatch):
    """And does not move the others one column to the left."""
    numbers = {"adapters": 0, "repeat": 0, "num_requests": 1, "foreign_cores": 0.0, "num_cached_tokens": 0}
    measured = [
        Measurement(**numbers | {"system": system, "adapters": n, "duration_s": 1.0, "median_latency_s": 1.0})
        for system, counts in (("none", (0, 1, 8, 32, 64)), ("unified_lora", (1, 32, 64)))
        for n in counts
    ]
    file = SimpleNamespace(measurements=measured)
    monkeypatch.setattr(adapter_tax, "_TINY", file)
    head, _, *rows = adapter_tax.cpu_ratios().splitlines()
    assert {row.count("|") for row in rows} == {head.count("|")}
    assert rows[0] == "| LoRA / no adapters | 1.00 |  | 1.00 | 1.00 | 0.90 |"


def test_a_study_that_was_cut_short_leaves_cells_empty(monkeypatch: pytest.MonkeyPatch):
    """One task with two of five arms, one seed."""
    figures = ("exact", "near", "answer_tokens", "right_tokens", "endless")
    line = {name: {"mean": 0.5, "low": None, "high": None} for name in figures}
    line |= {"task": "facts", "kind": "lora", "rank": 16, "num_seeds": 1}
    lines = [{**line, "arm": "all"}, {**line, "arm": "converted"}]
    lines[1] |= {"num_seeds": 3, "exact": {"mean": 0.25, "low": -0.1, "high": 0.6}}
    document = positions._FILE.document | {"compared": lines, "rows": []}
    file = SimpleNamespace(document=document, machine="one GPU", commit="0123456")
    monkeypatch.setattr(positions, "_FILE", file)
    assert "| LoRA, facts | 0.50 |  |  |  | 0.25 (0.00\u20130.60) |\n\none GPU" in positions.exact()
    assert positions.lengths().endswith("| LoRA, rank 16 | 1.00 (50.0 %) |  |  |  | 1.00 (50.0 %) |")
    assert positions.chart().count("<title>") == 3  # its own, and one for each point


def test_the_study_of_positions_shows_what_its_page_says():
    lines = [each for each in positions._FILE.document["compared"] if each["rank"] == 16 and each["num_seeds"] == 3]
    behind = {
        arm: [each["behind"]["mean"] for each in lines if each["arm"] == arm and "behind" in each]
        for arm in positions.ARMS
    }
    assert len(behind["converted"]) == 10  # five tasks, two kinds
    assert max(behind["converted"]) < 0.025
    assert max(behind["prefill"]) < 0.035
    assert max(each["exact"]["mean"] for each in lines if each["arm"] == "all as prefill") < 0.27


@pytest.mark.parametrize("path", sorted(evidence.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_names_its_machine_commit_and_a_command_that_parses(path: Path):
    file = ResultFile(path)
    assert file.machine
    assert re.fullmatch(r"[0-9a-f]{7}(\+changes)?", file.commit)
    program, *arguments = shlex.split(file.command)
    assert program == "prelude"
    _parser().parse_args(arguments)


def test_the_committed_runs_on_an_h200_meet_the_goal():
    """README.md and docs/evidence.md say so. The same measure finds what adapters cost stock SGLang."""
    runs = ResultFile(evidence.RESULTS / "adapter-tax-h200-llama-3.1-8b-rank16-two-repeats.json")
    stock = ResultFile(evidence.RESULTS / "adapter-tax-h200-llama-3.1-8b-rank16-stock-two-repeats.json")
    for adapters in (1, 32, 512):
        for system in ("unified_lora", "unified_direft"):
            (ratio,) = cells.ratios(runs, system, "none", (adapters,))
            (of_latency,) = cells.latency_ratios(runs, system, (adapters,))
            assert min(ratio, of_latency) >= 0.97, (system, adapters)
        assert cells.ratios(stock, "stock", "none", (adapters,)) < [0.55]


class TestResultFile:
    @pytest.fixture
    def file(self, tmp_path: Path) -> ResultFile:
        document = {
            "rows": [{"system": "none", "adapters": 8, "requests_per_s": 50.0}],
            "repeats": [
                {"system": "none", "adapters": 8, "median_latency_s": seconds, "repeat": repeat}
                for repeat, seconds in enumerate((0.5, 0.3, 0.4))
            ],
            "commit": "0123456789abcdef+changes",
            "command": "prelude bench adapter-tax --engine-arguments=--a b --json tax.json --plot=tax.png",
            "settings": {"engine_arguments": ["--a", "b"]},
            "hardware": {"cores": 2, "gpu": "none used"},
        }
        (tmp_path / "tax.json").write_text(json.dumps(document))
        return ResultFile(tmp_path / "tax.json")

    def test_figures(self, file: ResultFile):
        assert file.rate("none", 8) == 50.0
        assert file.latency_s("none", 8) == 0.4
        assert file.rate("none", 32) is None
        assert file.latency_s("stock", 8) is None

    def test_source(self, file: ResultFile):
        assert file.commit == "0123456+changes"
        assert file.machine == "2 CPU cores"
        assert file.command == "prelude bench adapter-tax --engine-arguments='--a b'"
