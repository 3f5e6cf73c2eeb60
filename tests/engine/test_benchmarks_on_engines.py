"""`prelude bench matrix` on real engines, small. Before it measures, it asks every adapter for an answer of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "systems"),
    [
        ("pioneer --systems stock_pd,pair --adapters 4 --slots 4", {"stock_pd", "pair"}),
        ("adapter-tax --systems none,unified_direft --adapters 2 --slots 2", {"none", "unified_direft"}),
        ("pioneer --systems none,unified --all-shares 0,0.5 --adapters 2 --slots 4", {"none", "unified"}),
        ("cold --systems unified --adapters 2,8 --slots 2 --host-adapters 4", {"unified"}),
    ],
)  # fmt: skip
def test_requests_are_answered(tmp_path: Path, words: str, systems: set[str]):
    file = tmp_path / "numbers.json"
    sizes = ["--scale", "0.03", "--duration-s", "3", "--repeats", "1", "--json", str(file)]
    command = [sys.executable, "-m", "cli.main", "bench", "matrix", *words.split(), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    loads = json.loads(file.read_text())["loads"]
    assert {each["system"] for each in loads} == systems
    assert all(each["summary"]["num_requests"] > 0 and each["summary"]["num_failed"] == 0 for each in loads)
