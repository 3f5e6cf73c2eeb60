"""Decode runs out of KV memory: requests that are retracted come back with their own adapted KV.

A cluster of its own, with little memory on the decode worker.
"""

from __future__ import annotations

from pathlib import Path

from support.clusters.running_cluster import CHUNK_TOKENS, running_cluster
from support.engines.parity import check_together, random_prompts, reference_cases

NEW_TOKENS = 160


def test_retracted_requests_come_back_with_their_own_kv(model_dir: Path, adapters: dict[str, Path], tmp_path: Path):
    names = ("a0", None, "reft", "mixed", "a1", None, "loreft", "a3")
    asked = zip(names, random_prompts(3, *range(30, 30 + len(names))), strict=True)
    cases = reference_cases(model_dir, tmp_path, adapters, asked, NEW_TOKENS)
    engine = {
        "device": "cpu",
        "max_total_tokens": 8192,
        "max_running_requests": 32,
        "chunked_prefill_tokens": CHUNK_TOKENS,
    }
    # Admit more than will fit, and less than one request's answer in reserve for each.
    small = {"max_total_tokens": 500, "extra_arguments": ["--num-reserved-decode-tokens", "16"]}
    workers = {"prefill-0": {"role": "prefill"}, "decode-0": {"role": "decode", "engine": small}}
    with running_cluster(tmp_path, model_dir, adapters, engine=engine, workers=workers) as cluster:
        check_together(cluster.url, cases, max_tokens=NEW_TOKENS)
        metrics = cluster.ask_engine("decode-0", "GET", "/metrics").text
        name = "sglang:num_retracted_requests_total"
        retracted = sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name))
        assert retracted > 0, "nothing was retracted: this proved nothing"
        print(f"{retracted:.0f} retractions")
