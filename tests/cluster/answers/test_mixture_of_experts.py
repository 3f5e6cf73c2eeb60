"""A pair on a mixture of experts: LoRA on attention and ReFT are served, LoRA on experts up to the allowed rank."""

from __future__ import annotations

import itertools
from pathlib import Path

import httpx
from support.adapters.random_adapters import write_random_expert_lora, write_random_lora, write_random_reft
from support.clusters.running_cluster import CHUNK_TOKENS, running_cluster
from support.engines.model_families import make_family
from support.engines.parity import check_together, completion_body, random_prompts, reference_cases

from adapters.model.base_model import BaseModel


def test_experts_are_served_up_to_the_rank_that_is_allowed(tmp_path: Path):
    make_family("mixtral", tmp_path / "model")
    base = BaseModel.read(tmp_path / "model")
    adapters = {
        "attention": write_random_lora(tmp_path / "attention", base, 1, modules=base.slot_modules()),
        "reft": write_random_reft(tmp_path / "reft", base, 2, rank=8),
        "experts": write_random_expert_lora(tmp_path / "experts", base, 3, rank=4, attention=["q_proj"]),
        "larger": write_random_expert_lora(tmp_path / "larger", base, 4, rank=5, experts=[1]),
    }
    prompts = random_prompts(5, 9, 2 * CHUNK_TOKENS + 5)
    asked = itertools.product((None, "attention", "reft", "experts"), prompts)
    cases = reference_cases(tmp_path / "model", tmp_path, adapters, asked)
    with running_cluster(tmp_path, tmp_path / "model", adapters, adapter_limits={"max_expert_rank": 4}) as cluster:
        check_together(cluster.url, cases, 1, echo=True, logprobs=1)
        body = completion_body("larger", prompts[0])
        refused = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
        assert refused.status_code == 422, refused.text
        assert refused.json()["error"]["code"] == "adapter_unsupported"
        assert "rank 5 on experts, and workers take at most 4" in refused.text
