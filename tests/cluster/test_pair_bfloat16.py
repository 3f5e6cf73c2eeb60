"""A prefill/decode pair in bfloat16, through the router: KV that adapters made, read by an engine that has none.

With PRELUDE_TEST_DEVICE=cuda it runs on a GPU, both engines on the same one. A cluster of its own.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest
from support.bfloat16 import Judge, cases_of
from support.parity import completion_body
from support.running_cluster import CHUNK_TOKENS, RunningCluster, running_cluster
from support.running_engine import DEVICE, EXTRA_ARGUMENTS

from adapters.model.base_model import BaseModel
from samples.random_adapters import write_random_lora, write_random_mixed, write_random_reft

NEW_TOKENS = 40


@pytest.fixture(scope="module")
def directories(model_dir: Path, tmp_path_factory) -> dict[str, Path]:
    base, root = BaseModel.read(model_dir), tmp_path_factory.mktemp("bfloat16")
    return {
        "lora": write_random_lora(root / "lora", base, 1, std=0.2, dtype="bfloat16"),
        "direft": write_random_reft(root / "direft", base, 2, rank=8, std=2.0),
        "loreft": write_random_reft(root / "loreft", base, 3, kind="loreft", std=2.0),
        "mixed": write_random_mixed(root / "mixed", base, 4),
    }


@pytest.fixture(scope="module")
def pair(model_dir: Path, directories: dict[str, Path], tmp_path_factory):
    engine = {
        "device": DEVICE,
        "max_total_tokens": 16384,
        "max_running_requests": 32,
        "chunked_prefill_tokens": CHUNK_TOKENS,
        "context_length": 2048,
        "extra_arguments": list(EXTRA_ARGUMENTS),
    }
    model = {"path": str(model_dir), "name": "demo", "dtype": "bfloat16"}
    root = tmp_path_factory.mktemp("pair")
    with running_cluster(root, model_dir, directories, model=model, engine=engine) as cluster:
        yield cluster


def test_parity_mixed(pair: RunningCluster, directories: dict[str, Path], tmp_path: Path):
    generator = random.Random(4)
    prompts = [
        (name, tuple(generator.randrange(10, 600) for _ in range(count)))
        for name in (None, *directories)
        for count in (9, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 5)
    ]
    cases = cases_of(prompts, NEW_TOKENS)

    async def run() -> list[dict]:
        async with httpx.AsyncClient(base_url=pair.url, timeout=120) as client:

            async def one(case) -> dict:
                body = completion_body(case.adapter, case.prompt_ids, max_tokens=NEW_TOKENS, echo=True, logprobs=1)
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, f"{case.name}: {answer.text}"
                return answer.json()

            return await asyncio.gather(*(one(case) for case in cases))

    known = Judge(pair.model_dir, directories, tmp_path).check(cases, asyncio.run(run()))
    plain = Judge(pair.model_dir, {}, tmp_path)
    for case in known:
        if case.adapter is not None and len(case.prompt_ids) > 9:  # the adapters matter: base answers would be far off
            body = completion_body(None, case.prompt_ids, max_tokens=NEW_TOKENS, echo=True, logprobs=1)
            answer = httpx.post(f"{pair.url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            base = answer.json()
            found = base["choices"][0]["logprobs"]["token_logprobs"][1 : len(case.prompt_ids)]
            wanted = case.reference["prompt_logprobs"][1:]
            assert sum(abs(f - w) for f, w in zip(found, wanted, strict=True)) / len(found) > 0.2, case.name
            plain.check(cases_of([(None, case.prompt_ids)], NEW_TOKENS), [base])
