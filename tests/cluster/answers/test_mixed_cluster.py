"""A pair beside a unified worker, as `prelude init --with-all-positions` writes them: adapters of both kinds.

A cluster of its own.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml
from support.adapters.random_adapters import write_random_lora
from support.clusters.running_cluster import CHUNK_TOKENS, RunningCluster, running_cluster
from support.engines.parity import Case, check_tokens, completion_body, random_prompts, reference_cases

from adapters.model.base_model import BaseModel
from cli.main import main

PAIR, UNIFIED = "prefill-0>decode-0", "unified-0"
POSITIONS = {"prompt-only": "prefill", "everywhere": "all"}
DEBUG = {"x-prelude-debug": "placement"}

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def directories(model_dir: Path, tmp_path_factory) -> dict[str, Path]:
    """The same weights, for the positions that each one's name says."""
    base, root = BaseModel.read(model_dir), tmp_path_factory.mktemp("adapters")
    return {
        name: write_random_lora(root / name, base, 40, config={"prelude": {"positions": positions}})
        for name, positions in POSITIONS.items()
    }


@pytest.fixture(scope="module")
def mixed(model_dir: Path, directories: dict[str, Path], tmp_path_factory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("mixed")
    path = folder / "written.yaml"
    main(["init", "--model", str(model_dir), "--gpus", "0", "--with-all-positions", "--config", str(path)])
    written = yaml.safe_load(path.read_text())
    sections = {name: written[name] for name in ("workers", "adapter_limits", "residency")}
    with running_cluster(
        folder, model_dir, directories, router={"port": 0, "debug_header": True}, **sections
    ) as cluster:
        yield cluster


def test_each_adapter_is_served_at_its_positions(
    mixed: RunningCluster, directories: dict[str, Path], tmp_path: Path
) -> None:
    """Token by token, one at a time and all at once; then the unified worker has both kinds in its batches."""
    asked = itertools.product(POSITIONS, random_prompts(6, 9, CHUNK_TOKENS + 5))
    cases = reference_cases(mixed.model_dir, tmp_path, directories, asked)
    assert cases[0].reference["tokens"] != cases[2].reference["tokens"], "the positions make no difference"

    def served_by(case: Case) -> str:
        body = completion_body(case.adapter, case.prompt_ids)
        answer = httpx.post(f"{mixed.url}/v1/completions", json=body, headers=DEBUG, timeout=120)
        assert answer.status_code == 200, f"{case.name}: {answer.text}"
        check_tokens(case, answer.json())
        placement, _, _ = answer.headers["x-prelude-placement"].partition(" ")
        assert placement == UNIFIED if case.adapter == "everywhere" else placement in (PAIR, UNIFIED), case.name
        return placement

    with ThreadPoolExecutor(len(cases)) as threads:
        for case in cases:
            served_by(case)
        list(threads.map(served_by, 3 * cases))
        main(["workers", "drain", "prefill-0", "--config", str(mixed.logs.parent / "cluster.yaml")])
        assert set(threads.map(served_by, 3 * cases)) == {UNIFIED}
