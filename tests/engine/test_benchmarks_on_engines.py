"""`prelude bench matrix` on real engines, small. Before it measures, it asks every adapter for an answer of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "ratios"),
    [
        # SGLang's own pair, too.
        ("pioneer --systems stock_pd,pair --adapters 4 --slots 4", {("pair", "stock_pd")}),
        # LoRA and DiReFT beside each other.
        (
            "adapter-tax --systems none,unified,unified_direft --adapters 2 --slots 2",
            {("unified", "none"), ("unified_direft", "none")},
        ),
        ("pioneer --systems none,unified --all-shares 0,0.5 --adapters 2 --slots 4", {("unified", "none")}),
        # More adapters than host memory.
        ("cold --systems unified --adapters 2,8 --slots 2 --host-adapters 4", set()),
    ],
)
def test_every_request_is_answered(words: str, ratios: set[tuple[str, str]], tmp_path: Path):
    file = tmp_path / "numbers.json"
    command = [sys.executable, "-m", "cli.main", "bench", "matrix", *words.split(), "--scale", "0.03"]
    command += ["--duration-s", "2", "--repeats", "1", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(file.read_text())
    assert {each["cell"] for each in found["loads"]} == set(found["settings"]["cells"])
    assert {each["system"] for each in found["loads"]} == set(found["settings"]["systems"])
    assert all(each["summary"]["num_good"] > 0 and each["summary"]["num_failed"] == 0 for each in found["loads"])
    assert {(each["system"], each["to"]) for each in found["ratios"]} == ratios
