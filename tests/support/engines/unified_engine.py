"""A unified engine with adapters loaded, asked what the reference is asked."""

import dataclasses
from pathlib import Path

import httpx
from support.engines.parity import (
    Case,
    check_logprobs,
    check_tokens,
    complete_together,
    completion_body,
    random_prompts,
    reference_cases,
)
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
        fields = {"max_tokens": len(case.reference["tokens"]), "echo": True, "logprobs": 1, **fields}
        body = completion_body(None, case.prompt_ids, **fields)
        return body if case.adapter is None else {**body, "lora_path": self.revisions[case.adapter]}

    def unload(self, adapter: str) -> httpx.Response:
        body = {"lora_name": self.revisions[adapter]}
        return httpx.post(f"{self.engine.spec.url}/unload_lora_adapter", json=body, timeout=120)

    def ask(self, case: Case, **fields) -> dict:
        [answer] = self.ask_together([case], **fields)
        return answer

    def ask_together(self, cases: list[Case], **fields) -> list[dict]:
        return complete_together(self.engine.spec.url, [self.body(case, **fields) for case in cases])

    def cases(self, prompts: list[tuple[str | None, tuple[int, ...]]], new_tokens: int = NEW_TOKENS) -> list[Case]:
        """(adapter, prompt) with the reference's answers."""
        return reference_cases(self.engine.spec.model_path, self.folder, self.directories, prompts, new_tokens)


def tokens(count: int, seed: int) -> tuple[int, ...]:
    [prompt] = random_prompts(seed, count)
    return prompt


def check(case: Case, answer: dict) -> float:
    check_tokens(case, answer)
    return check_logprobs(case, answer)
