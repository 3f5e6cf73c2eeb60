"""What the router learns from the answers of every kind of request: the sizes of prompts, and of prefix caches."""

from __future__ import annotations

from typing import Any

import pytest
from support.router_stand_ins import MODEL, running_cluster

from router.placement.placer import Placer, Reservation
from router.placement.request import PromptMeter

TEXT = "The sea is wide. " * 100
PAIR, PREFILL, UNIFIED = (1, 1, 0), (1, 0, 0), (0, 0, 1)
GENERATIONS = [("/v1/completions", {"prompt": TEXT}), ("/v1/completions", {"prompt": TEXT, "stream": True})]
READINGS = [("/v1/completions", {"prompt": TEXT, "max_tokens": 0}), ("/v1/embeddings", {"input": TEXT})]
CASES = [(shape, *each) for shape in (PAIR, UNIFIED) for each in GENERATIONS]
CASES += [(shape, *each) for shape in (PREFILL, UNIFIED) for each in READINGS]


class Learnt:
    """Records what placement is told of prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.expected_tokens: list[int] = []
        self.prompt_tokens: list[int] = []
        self.cached_tokens: list[int] = []

        def observe(_: PromptMeter, size: Any, prompt_tokens: int) -> None:
            self.expected_tokens.append(size.prompt_tokens)
            self.prompt_tokens.append(prompt_tokens)

        def found_cached(_: Placer, placed: Reservation, tokens: int) -> None:
            self.cached_tokens.append(tokens)

        monkeypatch.setattr(PromptMeter, "observe", observe)
        monkeypatch.setattr(Placer, "found_cached", found_cached)


@pytest.mark.parametrize(("shape", "path", "fields"), CASES)
async def test_prompts_and_prefix_caches_are_learnt(
    shape: tuple[int, int, int], path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt = Learnt(monkeypatch)

    async with running_cluster(*shape) as cluster:
        for tokens in (5, 0):
            for worker in cluster.workers:
                worker.engine.num_cached_tokens = tokens if worker.role != "decode" else 99
            async with cluster.http.post(f"{cluster.url}{path}", json={"model": MODEL, **fields}) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
    assert (learnt.prompt_tokens, learnt.cached_tokens) == ([7, 7], [5, 0])
    assert all(400 < tokens < 500 for tokens in learnt.expected_tokens)
