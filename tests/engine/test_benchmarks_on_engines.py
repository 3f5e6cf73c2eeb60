"""Benchmarks on a real engine, small: adapters swap slots, SGLang's profiler is read for every kind, streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
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
def test_slots(tmp_path: Path):
    found = numbers_of(tmp_path, "slots", "--quick")
    assert [(each["adapters"], each["fills"]) for each in found["medians"]] == [(2, 0), (4, 16)]
    assert all(0 < each["first_token_p50_ms"] <= each["first_token_p95_ms"] for each in found["rows"])


@pytest.mark.long
def test_prompt_profile(tmp_path: Path):
    found = numbers_of(tmp_path, "prompt-profile", "--kinds", "plain,none,lora,direft", "--quick")
    rows = {each["kind"]: each for each in found["rows"]}
    assert list(rows) == ["plain", "none", "lora", "direft"]
    operators = {kind: {part["name"] for part in row["parts"]} for kind, row in rows.items()}
    assert all("aten::mm" in each for each in operators.values())
    assert "aten::addmm_" not in operators["plain"] | operators["none"]  # the segmented products, on a CPU
    assert "aten::addmm_" in operators["lora"] & operators["direft"]
    assert all(row["client_ms"] > 0 and row["busy_ms"] > 0 for row in rows.values())


@pytest.mark.long
def test_streams(tmp_path: Path):
    whole, streamed = numbers_of(tmp_path, "streams", "--quick")["medians"]
    assert (whole["streamed"], streamed["streamed"]) == (False, True)
    assert (whole["tokens_per_event"], whole["bound"]) == (32, 20)
    assert 1 < streamed["tokens_per_event"] < 8
    assert streamed["of_not_streamed"] > 0


@pytest.mark.long
def test_first_tokens(tmp_path: Path):
    pair, unified = numbers_of(tmp_path, "first-token", "--quick")["rows"]
    assert (pair["layout"], unified["layout"]) == ("pair", "unified")
    assert [len(each["first_token_ms"]) for each in (pair, unified)] == [3, 3]
    assert {"prefill_bootstrap", "prefill_forward", "prefill_transfer_kv_cache"} <= pair["stages_ms"][
        "prefill-0"
    ].keys()
    # Means against means: of three requests, one that was slow lifts the mean of its stage above the median of all.
    assert 0 < pair["stages_ms"]["decode-0"]["decode_transferred"] < fmean(pair["first_token_ms"])
    assert 0 < unified["stages_ms"]["unified-0"]["prefill_forward"] < fmean(unified["first_token_ms"])


@pytest.mark.long
def test_both_pairs_serve_adapters(tmp_path: Path):
    """SGLang's own pair, too. Before it measures, `matrix` asks every adapter for an answer of its own."""
    words = "matrix pioneer --systems stock_pd,pair --adapters 4 --slots 4 --scale 0.03 --duration-s 2 --repeats 1"
    found = numbers_of(tmp_path, *words.split())
    summaries = {each["system"]: each["summary"] for each in found["loads"]}
    assert list(summaries) == ["stock_pd", "pair"]
    assert all(each["num_requests"] > 0 and each["num_failed"] == 0 for each in summaries.values())
    stages = {each["system"]: each["stages_ms"] for each in found["loads"]}
    for each in stages.values():
        assert {"prefill_bootstrap", "prefill_forward", "prefill_transfer_kv_cache"} <= each["prefill-0"].keys()
        assert "decode_transferred" in each["decode-0"]
