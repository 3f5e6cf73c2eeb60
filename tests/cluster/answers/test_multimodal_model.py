"""A pair on checkpoints that are served as text: every kind of adapter answers as transformers and peft do."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest
from support.adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from support.clusters.running_cluster import CHUNK_TOKENS, running_cluster
from support.engines.model_families import make_family
from support.engines.parity import (
    NEW_TOKENS,
    Case,
    check_adapters_matter,
    check_embedding,
    check_logprobs,
    check_tokens,
    completion_body,
)
from support.engines.reference_answers import run_reference

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
    generator = random.Random(5)
    prompts = [tuple(generator.randrange(10, 640) for _ in range(count)) for count in (9, 2 * CHUNK_TOKENS + 5)]
    asked = [(name, ids) for name in (None, *adapters) for ids in prompts]
    requests = [
        {"adapter": name and adapters[name], "prompt_ids": ids, "max_new_tokens": NEW_TOKENS, "positions": "prefill"}
        for name, ids in asked
    ]
    answers = run_reference(model, requests, tmp_path)
    cases = [Case(name, f"{len(ids)}", ids, found) for (name, ids), found in zip(asked, answers, strict=True)]
    check_adapters_matter(cases)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with (
        running_cluster(tmp_path, model, adapters) as cluster,
        httpx.Client(base_url=cluster.url, timeout=120) as client,
    ):
        for case in cases:
            answer = client.post(
                "/v1/completions", json=completion_body(case.adapter, case.prompt_ids, echo=True, logprobs=1)
            )
            assert answer.status_code == 200, f"{case.name}: {answer.text}"
            check_tokens(case, answer.json())
            check_logprobs(case, answer.json())
            check_embedding(case, lambda body: client.post("/v1/embeddings", json=body))
        chat = {"model": "demo", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}
        assert client.post("/v1/chat/completions", json={**chat, "max_tokens": 3}).status_code == 200
        chat["messages"][0]["content"].append(picture)
        refused = client.post("/v1/chat/completions", json={**chat, "max_tokens": 3})
        assert (refused.status_code, "image_url" in refused.text) == (400, True), refused.text
