"""`prelude bench cold-load` on a real cluster of its own, small: that it measures, not what."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_benchmark_runs(tmp_path: Path):
    file = tmp_path / "numbers.json"
    words = [sys.executable, "-m", "cli.main", "bench", "cold-load", "--quick", "--json", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(file.read_text())
    assert found["command"] == "prelude bench cold-load --quick --json numbers.json"
    assert found["adapter_tensors"] == 4 * 7 * 2
    for key in ("loader_speedup", "sixteen_over_one", "resident_first_token_p95_ratio", "overcommit_throughput_ratio"):
        assert found[key] > 0, key
        assert f"{key} " in done.stdout
    assert found["last_of_many_ms"] > 0.5 * found["one_cold_ms"] > 0
    assert found["all_resident_requests_per_s"] > 0
