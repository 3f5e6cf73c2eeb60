"""Prefill and decode pools with different tensor parallel sizes: KV is cut by heads on its way, the answers are right.

Each pair is a cluster of its own, with one CPU core per rank.
"""

import itertools
from pathlib import Path

import pytest
from support.clusters.running_cluster import CHUNK_TOKENS, running_cluster
from support.engines.parity import Case, check_together, random_prompts, reference_cases

pytestmark = pytest.mark.long

ADAPTERS = (None, "a0", "reft", "mixed")


@pytest.fixture(scope="module")
def cases(model_dir: Path, adapters: dict[str, Path], tmp_path_factory) -> list[Case]:
    """Prompts within a chunk and over several, under each adapter, with the reference's answer."""
    asked = itertools.product(ADAPTERS, random_prompts(7, 11, 2 * CHUNK_TOKENS + 5))
    return reference_cases(model_dir, tmp_path_factory.mktemp("reference"), adapters, asked)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_answers_are_the_reference(
    prefill: int, decode: int, model_dir: Path, adapters: dict[str, Path], cases: list[Case], tmp_path: Path
):
    """One by one, then all at once."""
    assert len({tuple(case.reference["tokens"]) for case in cases}) > len(ADAPTERS)  # the adapters change answers
    workers = {
        "prefill-0": {"role": "prefill", "engine": {"tensor_parallel": prefill}},
        "decode-0": {"role": "decode", "engine": {"tensor_parallel": decode}},
    }
    with running_cluster(tmp_path, model_dir, adapters, workers=workers) as pair:
        for at_a_time in (1, None):
            check_together(pair.url, cases, at_a_time)
