"""What the load generator's own benchmark counts, in a small run with a real mock worker."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import load_capacity
from bench.errors import BenchError
from bench.load.record import Record

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_small_run_reaches_the_goal(tmp_path: Path):
    """Per second of CPU time, so that other work matters little; with its start, which longer runs leave behind."""
    lines: list[str] = []
    options = replace(load_capacity.QUICK, concurrency=32, num_requests=128, num_events=64)
    load_capacity.run(options, "prelude bench load-capacity", tmp_path / "a.json", lines.append)
    found = json.loads((tmp_path / "a.json").read_text())
    (repeat,) = found["repeats"]
    assert repeat["num_events"] == 128 * 64
    assert found["events_per_cpu_s"] > load_capacity.GOAL_EVENTS_PER_CPU_S
    assert repeat["events_per_read"] >= 1
    errors = repeat["itl_error_ms"]
    assert 0 <= errors["p50"] <= errors["p90"] <= errors["p99"]
    assert found["events_per_cpu_s"] == pytest.approx(128 * 64 / repeat["cpu_s"], rel=0.05)
    assert found["events_per_s"] == pytest.approx(128 * 64 / repeat["duration_s"], rel=0.05)
    assert lines[-1].startswith("medians: ")


@pytest.mark.slow
@pytest.mark.alone
def test_gaps_are_right_while_five_thousand_events_come_per_second(tmp_path: Path):
    """In the best of three repeats, and at the median: the rest is when this machine's cores are elsewhere."""
    options = replace(load_capacity.QUICK, repeats=3, concurrency=64, num_requests=320, num_events=64)
    found = load_capacity.run(options, "prelude bench load-capacity", None, lambda _line: None)
    assert max(each["events_per_s"] for each in found["repeats"]) > 5000
    assert min(each["itl_error_ms"]["p50"] for each in found["repeats"]) < 1


def test_the_error_of_a_gap_is_how_far_it_is_from_the_servers():
    records = [
        Record(session=number, turn=0, intended_s=0.0, sent_s=0.0, end_s=9.0, token_s=token_s)
        for number, token_s in enumerate([(1.0, 1.010, 1.021), (2.0,), (3.0, 3.007)])
    ]
    assert load_capacity.itl_errors_ms(records, 10) == pytest.approx([0, 1, 3])


def test_a_file_without_a_folder(tmp_path: Path):
    with pytest.raises(BenchError, match="there is no folder"):
        load_capacity.run(load_capacity.QUICK, "x", tmp_path / "no" / "a.json", print)


def test_the_published_number_is_that_of_the_result():
    found = json.loads((ROOT / "bench" / "results" / "load-capacity-cpu.json").read_text())
    rounded = round(found["events_per_cpu_s"], -3)
    assert rounded > load_capacity.GOAL_EVENTS_PER_CPU_S
    assert f"{rounded:,.0f} events" in " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
