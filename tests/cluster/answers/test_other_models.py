"""Pairs on checkpoints that are served as text, and on a mixture: answers are those of transformers and peft.

Of the mixture, LoRA on attention and ReFT are served, and LoRA on experts up to the allowed rank. `make test` has these
models on one engine, in tests/engine.
"""

import itertools
from pathlib import Path

import httpx
import pytest
from support.adapters.random_adapters import (
    write_random_expert_lora,
    write_random_lora,
    write_random_mixed,
    write_random_reft,
)
from support.clusters.running_cluster import CHUNK_TOKENS, ENGINE, running_cluster
from support.engines.attention_sinks import give_engines_sinks
from support.engines.model_families import make_family
from support.engines.parity import (
    check_adapters_matter,
    check_embedding,
    check_together,
    completion_body,
    random_prompts,
    reference_cases,
)

from adapters.model.base_model import BaseModel

pytestmark = pytest.mark.long

PROMPTS = random_prompts(5, 9, 2 * CHUNK_TOKENS + 5)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma3_vl", "glm4", "glm4_moe", "gpt_oss"])
def test_other_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str):
    model = tmp_path / "model"
    make_family(family, model)
    base = BaseModel.read(model)
    adapters = {
        "lora": write_random_lora(tmp_path / "lora", base, 1, modules=base.slot_modules()),
        "direft": write_random_reft(tmp_path / "direft", base, 2, rank=8),
        "loreft": write_random_reft(tmp_path / "loreft", base, 3, kind="loreft"),
        "mixed": write_random_mixed(tmp_path / "mixed", base, 4, modules=base.slot_modules(("q_proj", "down_proj"))),
    }
    cases = reference_cases(model, tmp_path, adapters, itertools.product((None, *adapters), PROMPTS))
    check_adapters_matter(cases)
    arguments = give_engines_sinks(tmp_path, monkeypatch) if family == "gpt_oss" else ()
    engine = {**ENGINE, "extra_arguments": list(arguments)}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with (
        running_cluster(tmp_path, model, adapters, engine=engine) as cluster,
        httpx.Client(base_url=cluster.url, timeout=120) as client,
    ):
        check_together(cluster.url, cases, 1, echo=True, logprobs=1)
        for case in cases:
            check_embedding(case, lambda body: client.post("/v1/embeddings", json=body))
        chat = {"model": "demo", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}
        assert client.post("/v1/chat/completions", json={**chat, "max_tokens": 3}).status_code == 200
        chat["messages"][0]["content"].append(picture)
        refused = client.post("/v1/chat/completions", json={**chat, "max_tokens": 3})
        assert (refused.status_code, "image_url" in refused.text) == (400, True), refused.text


def test_experts_are_served_up_to_the_rank_that_is_allowed(tmp_path: Path):
    make_family("mixtral", tmp_path / "model")
    base = BaseModel.read(tmp_path / "model")
    adapters = {
        "attention": write_random_lora(tmp_path / "attention", base, 1, modules=base.slot_modules()),
        "reft": write_random_reft(tmp_path / "reft", base, 2, rank=8),
        "experts": write_random_expert_lora(tmp_path / "experts", base, 3, rank=4, attention=["q_proj"]),
        "larger": write_random_expert_lora(tmp_path / "larger", base, 4, rank=5, experts=[1]),
    }
    asked = itertools.product((None, "attention", "reft", "experts"), PROMPTS)
    cases = reference_cases(tmp_path / "model", tmp_path, adapters, asked)
    with running_cluster(tmp_path, tmp_path / "model", adapters, adapter_limits={"max_expert_rank": 4}) as cluster:
        check_together(cluster.url, cases, 1, echo=True, logprobs=1)
        body = completion_body("larger", PROMPTS[0])
        refused = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
        assert refused.status_code == 422, refused.text
        assert refused.json()["error"]["code"] == "adapter_unsupported"
        assert "rank 5 on experts, and workers take at most 4" in refused.text
