"""SGLang's own benchmark client, `sglang.bench_serving` as it is installed, against a pair with an adapter."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.clusters.running_cluster import RunningCluster, sum_of

NUM_PROMPTS, NUM_TOKENS = 8, 6
# `python -m sglang.bench_serving` where packages are absent that it imports for pictures and for data sets of the Hub.
START = """
from engine import cpu_support
cpu_support.install()
import importlib.util, runpy, sys, types
if importlib.util.find_spec("datasets") is None:
    sys.modules["datasets"] = types.ModuleType("datasets")
    sys.modules["datasets"].load_dataset = None
runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)
"""
pytestmark = pytest.mark.long


def bench(
    cluster: RunningCluster, backend: str, model: str, file: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", START, "--backend", backend, "--base-url", cluster.url]
    words += ["--model", model, "--tokenizer", str(cluster.model_dir), "--dataset-name", "random-ids"]
    words += ["--num-prompts", str(NUM_PROMPTS), "--random-input-len", "24", "--random-output-len", str(NUM_TOKENS)]
    words += ["--random-range-ratio", "1", "--output-file", str(file), "--disable-tqdm", *more]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


def num_ensured(cluster: RunningCluster) -> float:
    """Sequences so far for which a worker was asked to have their adapter."""
    return sum_of(httpx.get(f"{cluster.admin_url}/metrics", timeout=30).text, "prelude_router_ensured_adapters_total{")


@pytest.mark.parametrize("backend", ["sglang-oai", "sglang-oai-chat"])
@pytest.mark.parametrize("model", ["demo", "a0"])
def test_every_request_is_answered(cluster: RunningCluster, backend: str, model: str, tmp_path: Path):
    before = num_ensured(cluster)
    done = bench(cluster, backend, model, tmp_path / "found.jsonl")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "found.jsonl").read_text())
    assert found["completed"] == NUM_PROMPTS
    assert found["total_output_tokens"] == NUM_PROMPTS * NUM_TOKENS
    assert found["median_ttft_ms"] > 0
    # One more than was measured: it warms up with one.
    assert num_ensured(cluster) - before == (NUM_PROMPTS + 1 if model == "a0" else 0)


def test_an_engines_adapter_is_refused_with_the_reason(cluster: RunningCluster, tmp_path: Path):
    """`--lora-name` is sent as `lora_path`, which could name another tenant's adapter."""
    done = bench(cluster, "sglang-oai", "demo", tmp_path / "found.jsonl", "--lora-name", "a0")
    assert done.returncode != 0
    assert "lora_path is not offered: name the adapter in `adapter`" in done.stdout + done.stderr
