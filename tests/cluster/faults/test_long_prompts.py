"""Pairs with one small engine and SGLang's own reserve for answers: prompts nearly as long as its KV cache.

`make test` has a small decode engine in answers/test_pair_bfloat16.py, and a small unified one in
answers/test_unified_worker.py. Clusters of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clusters.long_prompts import PAGE_TOKENS, POOL_TOKENS, check_lengths
from support.clusters.running_cluster import ENGINE, running_cluster


@pytest.mark.long
@pytest.mark.parametrize("small", ["prefill", "decode"])
def test_each_is_answered_or_refused(model_dir: Path, adapters: dict[str, Path], tmp_path: Path, small: str):
    engine = {**ENGINE, "chunked_prefill_tokens": 256, "kv_page_tokens": PAGE_TOKENS}
    workers = {f"{role}-0": {"role": role} for role in ("prefill", "decode")}
    workers[f"{small}-0"]["engine"] = {"max_total_tokens": POOL_TOKENS}
    with running_cluster(tmp_path, model_dir, adapters, engine=engine, workers=workers) as cluster:
        check_lengths(cluster, "a0", "reft")
