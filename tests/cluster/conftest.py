"""One real cluster for the whole session: router, prefill and decode workers, real SGLang engines, KV over NIXL.

It is started as users start it, by `prelude up`, in processes of its own.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from support.clusters.running_cluster import RunningCluster, running_cluster

from adapters.model.base_model import BaseModel
from cluster.local.demo import make_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """A small Llama with random weights, float32."""
    folder = tmp_path_factory.mktemp("model") / "base"
    make_model(folder)
    return folder


@pytest.fixture(scope="session")
def adapters(tmp_path_factory, model_dir: Path) -> dict[str, Path]:
    """Adapters as users have them, and a zero one."""
    base, root = BaseModel.read(model_dir), tmp_path_factory.mktemp("adapters")
    return {
        "a0": write_random_lora(root / "a0", base, seed=10),
        "a1": write_random_lora(root / "a1", base, seed=11, modules=("q_proj",), rank=4, use_rslora=True),
        "a2": write_random_lora(
            root / "a2", base, seed=12, modules=("v_proj", "up_proj"), rank=16, rank_pattern={"up_proj": 3}, alpha=8
        ),
        "a3": write_random_lora(root / "a3", base, seed=13, dtype="bfloat16", layers=(1, 3), std=0.6),
        "reft": write_random_reft(root / "reft", base, 15, rank=8),
        "loreft": write_random_reft(root / "loreft", base, 16, kind="loreft", layers=(0, 2)),
        "mixed": write_random_mixed(root / "mixed", base, 17),
        "zero": write_random_lora(root / "zero", base, seed=14, zero=True),
    }


@pytest.fixture(scope="session")
def cluster(tmp_path_factory, model_dir: Path, adapters: dict[str, Path]) -> Iterator[RunningCluster]:
    """The cluster that most tests share."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), model_dir, adapters) as running:
        yield running
