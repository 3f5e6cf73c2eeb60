"""What the load generator's own benchmark counts, in a small run with a real mock worker."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import load_capacity
from bench.errors import BenchError

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
    assert found["events_per_cpu_s"] == pytest.approx(128 * 64 / repeat["cpu_s"], rel=0.05)
    assert found["events_per_s"] == pytest.approx(128 * 64 / repeat["duration_s"], rel=0.05)
    assert lines[-1].startswith("medians: ")


def test_a_file_without_a_folder(tmp_path: Path):
    with pytest.raises(BenchError, match="there is no folder"):
        load_capacity.run(load_capacity.QUICK, "x", tmp_path / "no" / "a.json", print)


def test_the_published_number_is_that_of_the_result():
    found = json.loads((ROOT / "bench" / "results" / "load-capacity-cpu.json").read_text())
    rounded = round(found["events_per_cpu_s"], -3)
    assert rounded > load_capacity.GOAL_EVENTS_PER_CPU_S
    assert f"{rounded:,.0f} events" in " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
