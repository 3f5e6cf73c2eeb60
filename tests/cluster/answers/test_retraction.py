"""Decode runs out of KV memory: requests that are retracted come back with their own adapted KV.

A cluster of its own, with little memory on the decode worker.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
from support.clusters.running_cluster import CHUNK_TOKENS, running_cluster
from support.engines.parity import Case, check_tokens, completion_body
from support.engines.reference_answers import run_reference

NEW_TOKENS = 160


def test_retracted_requests_come_back_with_their_own_kv(model_dir: Path, adapters: dict[str, Path], tmp_path_factory):
    generator = random.Random(3)
    names = ("a0", None, "reft", "mixed", "a1", None, "loreft", "a3")
    prompts = [tuple(generator.randrange(10, 600) for _ in range(30 + n)) for n in range(len(names))]
    requests = [
        {"adapter": adapters[name] if name else None, "prompt_ids": ids, "max_new_tokens": NEW_TOKENS}
        for name, ids in zip(names, prompts, strict=True)
    ]
    answers = run_reference(model_dir, requests, tmp_path_factory.mktemp("reference"))
    cases = [
        Case(name, f"retracted {n}", ids, answer)
        for n, (name, ids, answer) in enumerate(zip(names, prompts, answers, strict=True))
    ]
    engine = {
        "device": "cpu",
        "max_total_tokens": 8192,
        "max_running_requests": 32,
        "chunked_prefill_tokens": CHUNK_TOKENS,
    }
    # Admit more than will fit, and less than one request's answer in reserve for each.
    small = {"max_total_tokens": 500, "extra_arguments": ["--num-reserved-decode-tokens", "16"]}
    workers = {"prefill-0": {"role": "prefill"}, "decode-0": {"role": "decode", "engine": small}}
    root = tmp_path_factory.mktemp("small")
    with running_cluster(root, model_dir, adapters, engine=engine, workers=workers) as cluster:

        async def ask() -> list[dict]:
            bodies = [completion_body(case.adapter, case.prompt_ids, max_tokens=NEW_TOKENS) for case in cases]
            async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
                answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
                assert [answer.status_code for answer in answers] == [200] * len(cases), answers[0].text
                return [answer.json() for answer in answers]

        for case, answer in zip(cases, asyncio.run(ask()), strict=True):
            check_tokens(case, answer)
        metrics = cluster.ask_engine("decode-0", "GET", "/metrics").text
        name = "sglang:num_retracted_requests_total"
        retracted = sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name))
        assert retracted > 0, "nothing was retracted: this proved nothing"
        print(f"{retracted:.0f} retractions")
