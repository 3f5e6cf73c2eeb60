"""No field, kind of request or kind of adapter is slow the first time: engines compile and load nothing lazily.

With PRELUDE_TEST_DEVICE=cuda it runs on a GPU. Clusters of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.adapters.random_adapters import write_random_expert_lora, write_random_lora, write_random_reft
from support.clusters.first_uses import measure_first_uses
from support.clusters.running_cluster import CHUNK_TOKENS, running_cluster
from support.engines.model_families import make_family
from support.engines.running_engine import DEVICE, EXTRA_ARGUMENTS

from adapters.model.base_model import BaseModel

PAIR = {"prefill-0": {"role": "prefill"}, "decode-0": {"role": "decode"}}
UNIFIED = {"unified-0": {"role": "unified"}}
ENGINE = {
    "device": DEVICE, "max_total_tokens": 16384, "max_running_requests": 32, "chunked_prefill_tokens": CHUNK_TOKENS,
    "context_length": 2048, "extra_arguments": EXTRA_ARGUMENTS,
}  # fmt: skip

pytestmark = [pytest.mark.long, pytest.mark.alone]


def check(root: Path, model_dir: Path, adapters: dict[str, Path], **sections: Any) -> None:
    dtype = "bfloat16" if DEVICE == "cuda" else "float32"
    model = {"path": str(model_dir), "name": "demo", "dtype": dtype, "tool_call_parser": "qwen25"}
    with running_cluster(root, model_dir, adapters, model=model, engine=ENGINE, **sections) as fresh:
        uses = measure_first_uses(fresh.url, adapters)
    for use in sorted(uses, key=lambda use: -use.first_s):
        print(f"{use.first_s:7.3f} s, then {use.second_s:.3f} s: {use.name}")
    assert not [use for use in uses if use.is_slow]


def test_a_pair(tmp_path: Path, model_dir: Path, adapters: dict[str, Path]) -> None:
    check(tmp_path, model_dir, adapters, workers=PAIR)


def test_a_unified_worker(tmp_path: Path, model_dir: Path, adapters: dict[str, Path]) -> None:
    base = BaseModel.read(model_dir)
    everywhere = {
        "everywhere": write_random_lora(tmp_path / "lora", base, 30, config={"prelude": {"positions": "all"}}),
        "everywhere-reft": write_random_reft(tmp_path / "reft", base, 31, positions="all"),
    }
    check(tmp_path, model_dir, {**adapters, **everywhere}, workers=UNIFIED)


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    make_family("mixtral", tmp_path / "model")
    base = BaseModel.read(tmp_path / "model")
    adapters = {
        "attention": write_random_lora(tmp_path / "attention", base, 1, modules=base.slot_modules()),
        "experts": write_random_expert_lora(tmp_path / "experts", base, 3, rank=4, attention=["q_proj"]),
    }
    check(tmp_path, tmp_path / "model", adapters, workers=UNIFIED, adapter_limits={"max_expert_rank": 4})
