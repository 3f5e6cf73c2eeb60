"""Pairs with one small engine and SGLang's own reserve for answers: prompts nearly as long as its KV cache.

`make test` has a small decode engine in answers/test_pair_bfloat16.py, and a small unified one in
answers/test_unified_worker.py. Clusters of their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.clusters.long_prompts import PAGE_TOKENS, POOL_TOKENS, check_lengths
from support.clusters.running_cluster import ENGINE, RunningCluster, running_cluster, sum_of
from support.engines.parity import check_together, random_prompts, reference_cases

NEW_TOKENS = 160
pytestmark = pytest.mark.long


@contextmanager
def pair(
    root: Path, model_dir: Path, adapters: dict[str, Path], small: str, *arguments: str
) -> Iterator[RunningCluster]:
    """A pair whose engine of one role is small, with these arguments of SGLang's."""
    engine = {**ENGINE, "chunked_prefill_tokens": 256, "kv_page_tokens": PAGE_TOKENS}
    workers = {f"{role}-0": {"role": role} for role in ("prefill", "decode")}
    workers[f"{small}-0"]["engine"] = {"max_total_tokens": POOL_TOKENS, "extra_arguments": [*arguments]}
    with running_cluster(root, model_dir, adapters, engine=engine, workers=workers) as cluster:
        yield cluster


@pytest.mark.parametrize("small", ["prefill", "decode"])
def test_each_is_answered_or_refused(model_dir: Path, adapters: dict[str, Path], tmp_path: Path, small: str):
    with pair(tmp_path, model_dir, adapters, small) as cluster:
        check_lengths(cluster, "a0", "reft")


def test_retracted_requests_come_back_with_their_own_kv(model_dir: Path, adapters: dict[str, Path], tmp_path: Path):
    """In float32, token for token. Decode admits more than will fit, and runs out of KV memory."""
    names = ("a0", None, "reft", "mixed", "a1", None, "loreft", "a3")
    asked = zip(names, random_prompts(3, *range(30, 30 + len(names))), strict=True)
    cases = reference_cases(model_dir, tmp_path, adapters, asked, NEW_TOKENS)
    with pair(tmp_path, model_dir, adapters, "decode", "--num-reserved-decode-tokens", "16") as cluster:
        check_together(cluster.url, cases, max_tokens=NEW_TOKENS)
        metrics = cluster.ask_engine("decode-0", "GET", "/metrics").text
    assert sum_of(metrics, "sglang:num_retracted_requests_total") > 0, "nothing was retracted: this proved nothing"
