"""`prelude bench slots` on a real engine, small: that it swaps adapters, and measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_the_benchmark_runs(tmp_path: Path):
    file = tmp_path / "numbers.json"
    words = [sys.executable, "-m", "cli.main", "bench", "slots", "--quick", "--json", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(file.read_text())
    assert [(each["adapters"], each["fills"]) for each in found["medians"]] == [(2, 0), (4, 16)]
    assert all(0 < each["first_token_p50_ms"] <= each["first_token_p95_ms"] for each in found["rows"])
