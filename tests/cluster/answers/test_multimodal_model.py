"""A pair on checkpoints that are served as text: every kind of adapter answers as transformers and peft do."""

from __future__ import annotations

import itertools
from pathlib import Path

import httpx
import pytest
from support.adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from support.clusters.running_cluster import CHUNK_TOKENS, running_cluster
from support.engines.model_families import make_family
from support.engines.parity import (
    check_adapters_matter,
    check_embedding,
    check_together,
    random_prompts,
    reference_cases,
)

from adapters.model.base_model import BaseModel

pytestmark = pytest.mark.long


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "gemma3_vl"])
def test_answers_are_the_reference(tmp_path: Path, family: str):
    model = tmp_path / "model"
    make_family(family, model)
    base = BaseModel.read(model)
    adapters = {
        "lora": write_random_lora(tmp_path / "lora", base, 1),
        "direft": write_random_reft(tmp_path / "direft", base, 2, rank=8),
        "loreft": write_random_reft(tmp_path / "loreft", base, 3, kind="loreft"),
        "mixed": write_random_mixed(tmp_path / "mixed", base, 4),
    }
    prompts = random_prompts(5, 9, 2 * CHUNK_TOKENS + 5)
    cases = reference_cases(model, tmp_path, adapters, itertools.product((None, *adapters), prompts))
    check_adapters_matter(cases)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with (
        running_cluster(tmp_path, model, adapters) as cluster,
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
