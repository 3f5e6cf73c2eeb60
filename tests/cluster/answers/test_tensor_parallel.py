"""Prefill and decode pools with different tensor parallel sizes: KV is cut by heads on its way, the answers are right.

Each pair is a cluster of its own, with one CPU core per rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.clusters.running_cluster import CHUNK_TOKENS, RunningCluster, running_cluster
from support.engines.parity import NEW_TOKENS, Case, check_tokens, completion_body
from support.engines.reference_answers import run_reference

pytestmark = pytest.mark.long

ADAPTERS = (None, "a0", "reft", "mixed")


@pytest.fixture(scope="module")
def cases(model_dir: Path, adapters: dict[str, Path], tmp_path_factory) -> list[Case]:
    """Prompts within a chunk and over several, under each adapter, with the reference's answer."""
    prompts = {
        "short": tuple(range(20, 31)),
        "several chunks": tuple(20 + 7 * number % 280 for number in range(2 * CHUNK_TOKENS + 5)),
    }
    asked = [(adapter, *prompt) for adapter in ADAPTERS for prompt in prompts.items()]
    answers = run_reference(
        model_dir,
        [
            {
                "adapter": adapters[adapter] if adapter else None,
                "prompt_ids": ids,
                "max_new_tokens": NEW_TOKENS,
                "positions": "prefill",
            }
            for adapter, _, ids in asked
        ],
        tmp_path_factory.mktemp("reference"),
    )
    return [Case(adapter, name, ids, answer) for (adapter, name, ids), answer in zip(asked, answers, strict=True)]


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["prefill 2, decode 1", "prefill 1, decode 2"])
def pair(request, model_dir: Path, adapters: dict[str, Path], tmp_path_factory) -> Iterator[RunningCluster]:
    prefill, decode = request.param
    workers = {
        "prefill-0": {"role": "prefill", "engine": {"tensor_parallel": prefill}},
        "decode-0": {"role": "decode", "engine": {"tensor_parallel": decode}},
    }
    with running_cluster(tmp_path_factory.mktemp("pair"), model_dir, adapters, workers=workers) as running:
        yield running


def test_answers_are_the_reference(pair: RunningCluster, cases: list[Case]):
    """One by one, then all at once."""
    assert len({tuple(case.reference["tokens"]) for case in cases}) > len(ADAPTERS)  # the adapters change answers
    with httpx.Client(base_url=pair.url, timeout=120) as client:
        for case in cases:
            answer = client.post("/v1/completions", json=completion_body(case.adapter, case.prompt_ids))
            assert answer.status_code == 200, f"{case.name}: {answer.text}"
            check_tokens(case, answer.json())

    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=pair.url, timeout=120) as client:
            bodies = [completion_body(case.adapter, case.prompt_ids) for case in cases]
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    for case, answer in zip(cases, asyncio.run(all_at_once()), strict=True):
        assert answer.status_code == 200, f"{case.name}: {answer.text}"
        check_tokens(case, answer.json())
