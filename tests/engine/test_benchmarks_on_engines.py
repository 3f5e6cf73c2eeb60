"""`prelude bench matrix` on real engines, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def numbers_of(tmp_path: Path, *words: str) -> dict[str, Any]:
    """What a run of a benchmark writes."""
    file = tmp_path / "numbers.json"
    command = [sys.executable, "-m", "cli.main", "bench", *words, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(file.read_text())


@pytest.mark.long
def test_both_pairs_serve_adapters(tmp_path: Path):
    """SGLang's own pair, too. Before it measures, `matrix` asks every adapter for an answer of its own."""
    words = "matrix pioneer --systems stock_pd,pair --adapters 4 --slots 4 --scale 0.03 --duration-s 2 --repeats 1"
    found = numbers_of(tmp_path, *words.split())
    summaries = {each["system"]: each["summary"] for each in found["loads"]}
    assert list(summaries) == ["stock_pd", "pair"]
    assert all(each["num_requests"] > 0 and each["num_failed"] == 0 for each in summaries.values())


@pytest.mark.long
def test_what_adapters_cost(tmp_path: Path):
    """LoRA and DiReFT beside each other, relative to no adapters."""
    words = "matrix adapter-tax --systems none,unified,unified_direft --adapters 2 --slots 2 --scale 0.03"
    found = numbers_of(tmp_path, *words.split(), "--duration-s", "2", "--repeats", "1")
    assert {(each["system"], each["to"]) for each in found["ratios"]} == {
        ("unified", "none"),
        ("unified_direft", "none"),
    }
    assert all(each["summary"]["num_good"] > 0 and each["summary"]["num_failed"] == 0 for each in found["loads"])


@pytest.mark.long
def test_adapters_for_all_positions_in_some_of_the_requests(tmp_path: Path):
    """Before it measures, `matrix` asks every adapter for an answer of its own, those for all positions, too."""
    words = "matrix pioneer --systems none,unified --all-shares 0,0.5 --adapters 2 --slots 4 --scale 0.03"
    found = numbers_of(tmp_path, *words.split(), "--duration-s", "2", "--repeats", "1")
    assert {each["cell"] for each in found["loads"]} == {"pioneer, n = 2", "pioneer all 0.5, n = 2"}
    assert all(each["summary"]["num_good"] > 0 and each["summary"]["num_failed"] == 0 for each in found["loads"])


@pytest.mark.long
def test_more_adapters_than_host_memory(tmp_path: Path):
    words = "matrix cold --systems unified --adapters 2,8 --slots 2 --host-adapters 4 --scale 0.03"
    found = numbers_of(tmp_path, *words.split(), "--duration-s", "3", "--repeats", "1")
    assert all(each["summary"]["num_good"] > 0 and each["summary"]["num_failed"] == 0 for each in found["loads"])
    [evenness] = found["evenness"]
    assert 0 < evenness["worst_over_best"] <= 1
