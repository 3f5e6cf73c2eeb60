"""A pair on a mixture of experts: LoRA on attention and ReFT are served, LoRA on experts up to the allowed rank."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
from support.adapters.random_adapters import write_random_expert_lora, write_random_lora, write_random_reft
from support.clusters.running_cluster import CHUNK_TOKENS, RunningCluster, running_cluster
from support.engines.model_families import make_family
from support.engines.parity import NEW_TOKENS, Case, check_logprobs, check_tokens, completion_body
from support.engines.reference_answers import run_reference

from adapters.model.base_model import BaseModel


def ask(cluster: RunningCluster, adapter: str | None, prompt_ids: tuple[int, ...]) -> httpx.Response:
    body = completion_body(adapter, prompt_ids, echo=True, logprobs=1)
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)


def prompts_of(seed: int) -> list[tuple[int, ...]]:
    generator = random.Random(seed)
    return [tuple(generator.randrange(10, 600) for _ in range(count)) for count in (9, 2 * CHUNK_TOKENS + 5)]


def cases_of(
    cluster: RunningCluster, names: tuple[str | None, ...], prompts: list[tuple[int, ...]], folder: Path
) -> list[Case]:
    asked = [(name, ids) for name in names for ids in prompts]
    requests = [
        {"adapter": name and cluster.adapters[name], "prompt_ids": ids, "max_new_tokens": NEW_TOKENS}
        for name, ids in asked
    ]
    references = run_reference(cluster.model_dir, requests, folder)
    return [Case(name, f"{len(ids)}", ids, found) for (name, ids), found in zip(asked, references, strict=True)]


def test_experts_are_served_up_to_the_rank_that_is_allowed(tmp_path: Path):
    make_family("mixtral", tmp_path / "model")
    base = BaseModel.read(tmp_path / "model")
    adapters = {
        "attention": write_random_lora(tmp_path / "attention", base, 1, modules=base.slot_modules()),
        "reft": write_random_reft(tmp_path / "reft", base, 2, rank=8),
        "experts": write_random_expert_lora(tmp_path / "experts", base, 3, rank=4, attention=["q_proj"]),
        "larger": write_random_expert_lora(tmp_path / "larger", base, 4, rank=5, experts=[1]),
    }
    with running_cluster(tmp_path, tmp_path / "model", adapters, adapter_limits={"max_expert_rank": 4}) as cluster:
        prompts = prompts_of(5)
        for case in cases_of(cluster, (None, "attention", "reft", "experts"), prompts, tmp_path):
            answer = ask(cluster, case.adapter, case.prompt_ids)
            assert answer.status_code == 200, f"{case.name}: {answer.text}"
            check_tokens(case, answer.json())
            check_logprobs(case, answer.json())
        refused = ask(cluster, "larger", prompts[0])
        assert refused.status_code == 422, refused.text
        assert refused.json()["error"]["code"] == "adapter_unsupported"
        assert "rank 5 on experts, and workers take at most 4" in refused.text
