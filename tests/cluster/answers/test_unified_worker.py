"""A cluster of one unified worker: adapters of each kind, also for all positions, through the router, from a bucket.

Its engine has little KV memory, in pages. A cluster of its own.
"""

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.adapters.random_adapters import write_random_lora, write_random_reft
from support.adapters.s3_server import BUCKET, S3Double
from support.clusters.long_prompts import PAGE_TOKENS, POOL_TOKENS, check_lengths
from support.clusters.running_cluster import CHUNK_TOKENS, RunningCluster, running_cluster, sum_of
from support.engines.parity import (
    Case,
    check_embedding,
    check_scales,
    check_together,
    check_tokens,
    completion_body,
    random_prompts,
    reference_cases,
)
from support.waiting import wait_until

from adapters.model.base_model import BaseModel

LONG_ANSWER_TOKENS = 160


@pytest.fixture(scope="module")
def directories(adapters: dict[str, Path], model_dir: Path, tmp_path_factory) -> dict[str, Path]:
    base, root = BaseModel.read(model_dir), tmp_path_factory.mktemp("everywhere")
    return {
        **{name: adapters[name] for name in ("a0", "a1", "reft", "mixed")},
        "everywhere": write_random_lora(root / "lora", base, 30, config={"prelude": {"positions": "all"}}),
        "everywhere-reft": write_random_reft(root / "reft", base, 31, positions="all"),
    }


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Double]:
    double = S3Double()
    with pytest.MonkeyPatch.context() as patch:  # where every AWS client looks for its keys
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        yield double
    double.stop()


@pytest.fixture(scope="module")
def unified(model_dir: Path, directories: dict[str, Path], bucket: S3Double, tmp_path_factory):
    small = {
        "max_total_tokens": POOL_TOKENS,
        "kv_page_tokens": PAGE_TOKENS,
        # It admits more than will fit, and prompts wait for decode steps, as on GPUs: some are retracted before
        # their first one.
        "extra_arguments": ["--schedule-conservativeness", "0.0", "--prefill-decode-interval", "3"],
    }
    with running_cluster(
        tmp_path_factory.mktemp("unified"),
        model_dir,
        directories,
        workers={"unified-0": {"role": "unified", "engine": small}},
        store={
            "url": f"s3://{BUCKET}/unified",
            "s3_endpoint_url": bucket.access.endpoint_url,
            "s3_region": "eu-central-1",
        },
        router={"port": 0, "management": True, "adapter_timeout_s": 8},
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cases(unified: RunningCluster, directories: dict[str, Path], tmp_path_factory) -> list[Case]:
    asked = itertools.product((None, *directories), random_prompts(4, 9, 2 * CHUNK_TOKENS + 5))
    return reference_cases(unified.model_dir, tmp_path_factory.mktemp("reference"), directories, asked)


def test_parity_alone_and_all_at_once(unified: RunningCluster, cases: list[Case]):
    for at_a_time in (1, None):
        check_together(unified.url, cases, at_a_time, echo=True, logprobs=1)
        check_together(unified.url, cases, at_a_time, echo=True, logprobs=0, max_tokens=0)


def test_embeddings(unified: RunningCluster, cases: list[Case]):
    """Also under adapters for all positions; and all at once, neighbours under different adapters."""

    def post(body: dict) -> httpx.Response:
        return httpx.post(f"{unified.url}/v1/embeddings", json=body, timeout=60)

    for case in cases:
        check_embedding(case, post)
    with ThreadPoolExecutor(len(cases)) as threads:
        list(threads.map(lambda case: check_embedding(case, post), cases))


def test_scales(unified: RunningCluster, directories: dict[str, Path], tmp_path: Path):
    check_scales(unified.url, unified.model_dir, tmp_path, directories, 2 * CHUNK_TOKENS + 21)


def test_long_prompts(unified: RunningCluster):
    check_lengths(unified, "a0", "reft")


def test_retracted_requests(unified: RunningCluster, directories: dict[str, Path], tmp_path: Path):
    """KV memory runs out while many decode: those that are retracted come back with their own adapters' KV."""
    names = ("a0", "reft", "mixed", "everywhere", None, "everywhere-reft", "a1", "a0")
    asked = zip(names, random_prompts(6, *range(30, 30 + len(names))), strict=True)
    cases = reference_cases(unified.model_dir, tmp_path, directories, asked, LONG_ANSWER_TOKENS)
    # For a request of a fixed length SGLang keeps the room that it will need, so these could end earlier, and do not.
    check_together(unified.url, cases, max_tokens=LONG_ANSWER_TOKENS, ignore_eos=False)
    metrics = unified.ask_engine("unified-0", "GET", "/metrics").text
    assert sum_of(metrics, "sglang:num_retracted_requests_total") > 0, "nothing was retracted: this proved nothing"
    # Next turns find no KV of answers that were read again, or written by decode.
    grown = [
        (case.adapter, (*case.prompt_ids, *case.reference["tokens"][:100], 17, 23))
        for case in cases
        if not str(case.adapter).startswith("everywhere")
    ]
    check_together(unified.url, reference_cases(unified.model_dir, tmp_path, directories, grown), 1)


def test_the_bucket_is_away(unified: RunningCluster, cases: list[Case], bucket: S3Double):
    """What is resident is served on, what is nowhere else is a 503, and comes by itself when the bucket is back."""
    resident, absent = (next(case for case in cases if case.adapter == name) for name in ("a0", "a1"))

    def ask(case: Case) -> httpx.Response:
        body = completion_body(case.adapter, case.prompt_ids, echo=True, logprobs=1)
        return httpx.post(f"{unified.url}/v1/completions", json=body, timeout=60)

    check_tokens(absent, ask(absent).json())
    check_tokens(resident, ask(resident).json())
    time.sleep(0.5)  # leases end, and what was loaded is written to the disk
    evicted = httpx.post(f"{unified.url}/v1/adapters/a1/evict", timeout=30)
    assert evicted.status_code == 200, evicted.text
    bucket.stop()
    try:
        check_tokens(resident, ask(resident).json())
        refused = ask(absent)
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["code"] == "adapter_store_unavailable"
        assert int(refused.headers["retry-after"]) >= 1
        check_tokens(resident, ask(resident).json())
    finally:
        bucket.start()
    wait_until(lambda: ask(absent).status_code != 503)
    check_tokens(absent, ask(absent).json())
