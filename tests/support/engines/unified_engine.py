"""A unified engine with adapters loaded, asked what the reference is asked."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path

import httpx
from support.engines.parity import Case, check_logprobs, check_tokens
from support.engines.reference_answers import run_reference
from support.engines.running_engine import RunningEngine

NEW_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Unified:
    """The engine with every adapter loaded."""

    engine: RunningEngine
    directories: dict[str, Path]
    revisions: dict[str, str]
    folder: Path

    def body(self, case: Case, **fields) -> dict:
        body = {
            "model": "demo",
            "prompt": list(case.prompt_ids),
            "max_tokens": len(case.reference["tokens"]),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "echo": True,
            "logprobs": 1,
            **fields,
        }
        return body if case.adapter is None else {**body, "lora_path": self.revisions[case.adapter]}

    def unload(self, adapter: str) -> httpx.Response:
        body = {"lora_name": self.revisions[adapter]}
        return httpx.post(f"{self.engine.spec.url}/unload_lora_adapter", json=body, timeout=60)

    def ask(self, case: Case, **fields) -> dict:
        answer = httpx.post(f"{self.engine.spec.url}/v1/completions", json=self.body(case, **fields), timeout=120)
        assert answer.status_code == 200, f"{case.name}: {answer.text}"
        return answer.json()

    def ask_together(self, cases: list[Case], **fields) -> list[dict]:
        async def run() -> list[dict]:
            async with httpx.AsyncClient(timeout=180, limits=httpx.Limits(max_connections=None)) as client:
                url = f"{self.engine.spec.url}/v1/completions"
                answers = await asyncio.gather(*(client.post(url, json=self.body(c, **fields)) for c in cases))
                for case, answer in zip(cases, answers, strict=True):
                    assert answer.status_code == 200, f"{case.name}: {answer.text}"
                return [answer.json() for answer in answers]

        return asyncio.run(run())

    def cases(self, prompts: list[tuple[str | None, tuple[int, ...]]], new_tokens: int = NEW_TOKENS) -> list[Case]:
        """(adapter, prompt) with the reference's answers. Positions are the adapter's own."""
        requests = [
            {
                "adapter": self.directories[adapter] if adapter else None,
                "prompt_ids": ids,
                "max_new_tokens": new_tokens,
                **({"positions": "all"} if adapter and adapter.startswith("everywhere") else {}),
            }
            for adapter, ids in prompts
        ]
        answers = run_reference(self.engine.spec.model_path, requests, self.folder)
        return [
            Case(adapter, f"{len(ids)} tokens", ids, answer)
            for (adapter, ids), answer in zip(prompts, answers, strict=True)
        ]


def tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(10, 600) for _ in range(count))


def check(case: Case, answer: dict) -> float:
    check_tokens(case, answer)
    return check_logprobs(case, answer)


def sum_of(metrics: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name))
