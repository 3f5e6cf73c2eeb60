"""Benchmarks on a real engine, small: adapters swap slots, SGLang's profiler is read for every kind, streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_slots(tmp_path: Path):
    file = tmp_path / "numbers.json"
    words = [sys.executable, "-m", "cli.main", "bench", "slots", "--quick", "--json", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(file.read_text())
    assert [(each["adapters"], each["fills"]) for each in found["medians"]] == [(2, 0), (4, 16)]
    assert all(0 < each["first_token_p50_ms"] <= each["first_token_p95_ms"] for each in found["rows"])


@pytest.mark.long
def test_prompt_profile(tmp_path: Path):
    file = tmp_path / "numbers.json"
    words = [sys.executable, "-m", "cli.main", "bench", "prompt-profile", "--quick", "--kinds", "none,lora,direft"]
    done = subprocess.run([*words, "--json", str(file)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = {each["kind"]: each for each in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["none", "lora", "direft"]
    operators = {kind: {part["name"] for part in row["parts"]} for kind, row in rows.items()}
    assert all("aten::mm" in each for each in operators.values())
    assert "aten::addmm_" not in operators["none"]  # the segmented products, on a CPU
    assert "aten::addmm_" in operators["lora"] & operators["direft"]
    assert all(row["client_ms"] > 0 and row["busy_ms"] > 0 for row in rows.values())


@pytest.mark.long
def test_streams(tmp_path: Path):
    file = tmp_path / "numbers.json"
    words = [sys.executable, "-m", "cli.main", "bench", "streams", "--quick", "--json", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    whole, streamed = json.loads(file.read_text())["medians"]
    assert (whole["streamed"], streamed["streamed"]) == (False, True)
    assert (whole["tokens_per_event"], whole["bound"]) == (32, 20)
    assert 1 < streamed["tokens_per_event"] < 8
    assert streamed["of_not_streamed"] > 0
