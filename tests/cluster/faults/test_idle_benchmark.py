"""`prelude bench idle` on a real pair of its own, small: that it measures, not what."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_the_benchmark_runs(tmp_path: Path):
    file = tmp_path / "numbers.json"
    words = [sys.executable, "-m", "cli.main", "bench", "idle", "--quick", "--json", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(file.read_text())
    assert found["ended"] == "after all loads"
    assert sum("scheduler" in each["name"] for each in found["processes"]) == 2
    assert 0 < found["scheduler_cores"] < found["cores"] < 1  # engines that poll take a core each
    assert len(found["first_token_after_pause_ms"]) == len(found["first_token_without_pause_ms"]) == 3
    assert found["first_token_after_pause_p50_ms"] > 0
