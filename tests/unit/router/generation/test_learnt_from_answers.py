"""What the router learns from the answers of every kind of request: the sizes of prompts, and of prefix caches."""

from typing import Any

import pytest
from support.router_stand_ins import MODEL, WORDS, running_cluster

from cluster.config.router import SloConfig
from router.placement.placer import Placer
from router.placement.request import PromptMeter

SLO = SloConfig(first_token_s=7)
TEXT = "The sea is wide. " * 100
PAIR, PREFILL, UNIFIED = (1, 1, 0), (1, 0, 0), (0, 0, 1)
GENERATIONS = [("/v1/completions", {"prompt": TEXT}), ("/v1/completions", {"prompt": TEXT, "stream": True})]
READINGS = [("/v1/completions", {"prompt": TEXT, "max_tokens": 0}), ("/v1/embeddings", {"input": TEXT})]
CASES = [(shape, *each) for shape in (PAIR, UNIFIED) for each in GENERATIONS]
CASES += [(shape, *each) for shape in (PREFILL, UNIFIED) for each in READINGS]


@pytest.mark.parametrize(("shape", "path", "fields"), CASES)
async def test_prompts_and_prefix_caches_are_learnt(
    shape: tuple[int, int, int], path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[tuple[int, int]] = []  # expected, and as counted by the engine
    cached: list[int] = []
    answers: list[tuple[int, SloConfig]] = []
    monkeypatch.setattr(PromptMeter, "observe", lambda _, size, tokens: prompts.append((size.prompt_tokens, tokens)))
    monkeypatch.setattr(Placer, "answered", lambda placer, tokens: answers.append((tokens, placer.policy.slo)))
    monkeypatch.setattr(Placer, "found_cached", lambda _, _placed, tokens: cached.append(tokens))

    async with running_cluster(*shape, slo=SLO) as cluster:
        for tokens in (5, 0):
            for worker in cluster.workers:
                worker.engine.num_cached_tokens = tokens if worker.role != "decode" else 99
            async with cluster.http.post(f"{cluster.url}{path}", json={"model": MODEL, **fields}) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
    assert ([counted for _, counted in prompts], cached) == ([7, 7], [5, 0])
    generates = (path, fields) in GENERATIONS
    assert answers == ([(len(WORDS), SLO)] * 2 if generates else [])
    assert all(400 < expected < 500 for expected, _ in prompts)
