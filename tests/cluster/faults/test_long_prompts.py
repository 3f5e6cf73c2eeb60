"""Pairs with one small engine: prompts nearly as long as its KV cache, and answers that outgrow that of decode.

`tests/cluster/answers/test_unified_worker.py` has a small unified engine. Clusters of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.clusters.long_prompts import PAGE_TOKENS, POOL_TOKENS, check_lengths
from support.clusters.running_cluster import ENGINE, RunningCluster, running_cluster
from support.engines.parity import check_together, random_prompts, reference_cases
from support.engines.unified_engine import sum_of

NEW_TOKENS = 160


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


@pytest.fixture(scope="module")
def small_decode(model_dir: Path, adapters: dict[str, Path], tmp_path_factory) -> Iterator[RunningCluster]:
    """It admits more than will fit, with less than one request's answer in reserve for each."""
    root = tmp_path_factory.mktemp("small")
    with pair(root, model_dir, adapters, "decode", "--num-reserved-decode-tokens", "16") as cluster:
        yield cluster


def test_each_is_answered_or_refused(small_decode: RunningCluster):
    check_lengths(small_decode)


def test_retracted_requests_come_back_with_their_own_kv(
    small_decode: RunningCluster, adapters: dict[str, Path], tmp_path: Path
):
    """Decode runs out of KV memory."""
    names = ("a0", None, "reft", "mixed", "a1", None, "loreft", "a3")
    asked = zip(names, random_prompts(3, *range(30, 30 + len(names))), strict=True)
    cases = reference_cases(small_decode.model_dir, tmp_path, adapters, asked, NEW_TOKENS)
    check_together(small_decode.url, cases, max_tokens=NEW_TOKENS)
    metrics = small_decode.ask_engine("decode-0", "GET", "/metrics").text
    retracted = sum_of(metrics, "sglang:num_retracted_requests_total")
    assert retracted > 0, "nothing was retracted: this proved nothing"
    print(f"{retracted:.0f} retractions")


@pytest.mark.long
@pytest.mark.parametrize("small", ["prefill", "decode"])
def test_each_is_answered_or_refused_with_sglangs_reserve(
    model_dir: Path, adapters: dict[str, Path], tmp_path: Path, small: str
):
    with pair(tmp_path, model_dir, adapters, small) as cluster:
        check_lengths(cluster)
