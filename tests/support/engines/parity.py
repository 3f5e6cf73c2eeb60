"""Requests whose right answers are known, and how an answer is held against them."""

import asyncio
import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import httpx
from safetensors import safe_open
from support.engines.reference_answers import run_reference

LOGPROB_TOLERANCE = 1e-4
EMBEDDING_TOLERANCE = 5e-5  # of a number of a vector of length 1
NEW_TOKENS = 12


@dataclass(frozen=True)
class Case:
    """One prompt under one adapter (or the base), with the reference's answer."""

    adapter: str | None
    prompt: str
    prompt_ids: tuple[int, ...]
    reference: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.adapter or 'base'}/{self.prompt}"


def random_prompts(seed: int, *counts: int) -> list[tuple[int, ...]]:
    """Prompts of so many tokens."""
    generator = random.Random(seed)
    return [tuple(generator.randrange(10, 600) for _ in range(count)) for count in counts]


def reference_cases(
    model_dir: Path,
    folder: Path,
    adapters: Mapping[str, Path],
    asked: Iterable[tuple[str | None, tuple[int, ...]]],
    new_tokens: int = NEW_TOKENS,
) -> list[Case]:
    """(adapter, prompt), with the reference's answers at the adapter's own positions. `folder` is for its files."""
    asked = list(asked)
    requests = [
        {"adapter": name and adapters[name], "prompt_ids": ids, "max_new_tokens": new_tokens} for name, ids in asked
    ]
    answers = run_reference(model_dir, requests, folder)
    return [Case(name, f"{len(ids)} tokens", ids, found) for (name, ids), found in zip(asked, answers, strict=True)]


def check_scales(url: str, model_dir: Path, folder: Path, adapters: Mapping[str, Path], num_tokens: int) -> None:
    """One prompt under adapters at several scales: each answer is that of a reference whose configuration is scaled.

    Asked for the first time, each finds no KV in the prefix cache; asked again, its own.
    """
    scales = (1.0, 0.5, 1.5, 0.05)
    names = [f"{name} x {scale}" for name in adapters for scale in scales]
    asked = [(name, scale) for name in adapters for scale in scales]
    copies = {
        text: _scaled_copy(adapters[name], scale, folder / text)
        for text, (name, scale) in zip(names, asked, strict=True)
    }
    [prompt] = random_prompts(num_tokens, num_tokens)  # as no other test has it
    cases = reference_cases(model_dir, folder, copies, [(name, prompt) for name in (*names, None)])
    check_adapters_matter(cases)
    bodies = [completion_body(name, prompt, adapter_scale=scale) for name, scale in asked]
    bodies.append(completion_body(None, prompt))
    for case, body in zip(cases, bodies, strict=True):
        answers = complete_together(url, [body, body], 1)
        cached = [(answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) for answer in answers]
        assert cached[0] < 8, f"{case.name}: it found KV of another scale or adapter"
        assert cached[1] > num_tokens // 2, f"{case.name}: it did not find its own KV"
        for answer in answers:
            check_tokens(case, answer)
    with_logprobs = [{**body, "echo": True, "logprobs": 1} for body in bodies]
    for case, answer in zip(cases, complete_together(url, with_logprobs), strict=True):
        check_logprobs(case, answer)
    for case, (name, scale) in zip(cases, asked, strict=False):
        body = {"model": "demo", "adapter": name, "adapter_scale": scale, "input": list(prompt)}
        answer = httpx.post(f"{url}/v1/embeddings", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert _most(answer.json()["data"][0]["embedding"], case.reference["embedding"]) <= EMBEDDING_TOLERANCE


def _scaled_copy(directory: Path, scale: float, copy: Path) -> Path:
    """An adapter, peft's or in Prelude's layout, whose configuration alone makes it act so many times as strongly."""
    shutil.copytree(directory, copy)
    for path in copy.glob("*.json"):
        config = json.loads(path.read_text())
        if "lora_alpha" in config:
            config["lora_alpha"] *= scale
            config["alpha_pattern"] = {name: alpha * scale for name, alpha in config["alpha_pattern"].items()}
        if "lora" in config:
            config["lora"]["scale"] *= scale
        if "reft" in config:
            with safe_open(copy / "adapter.safetensors", "np") as file:
                rank = next(
                    file.get_slice(name).get_shape()[0] for name in file.offset_keys() if name.endswith(".bias")
                )
            own = 1.0 if config["reft"]["kind"] == "loreft" else rank**-0.5  # docs/adapter-formats.md
            config["reft"]["scale"] = config["reft"].get("scale", own) * scale
        path.write_text(json.dumps(config))
    return copy


def completion_body(adapter: str | None, prompt_ids: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    """A greedy completion that also returns the log-probabilities of prompt and answer."""
    body = {
        "model": "demo",
        "prompt": list(prompt_ids),
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    return body if adapter is None else {**body, "adapter": adapter}


def complete_together(url: str, bodies: Sequence[dict[str, Any]], at_a_time: int | None = None) -> list[dict[str, Any]]:
    """The answers in the order of the requests; without `at_a_time`, all at once."""

    async def run() -> list[dict[str, Any]]:
        turns = asyncio.Semaphore(at_a_time or len(bodies))
        async with httpx.AsyncClient(base_url=url, timeout=180, limits=httpx.Limits(max_connections=None)) as client:

            async def one(body: dict[str, Any]) -> dict[str, Any]:
                async with turns:
                    answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, f"{body}: {answer.text}"
                return answer.json()

            return await asyncio.gather(*map(one, bodies))

    return asyncio.run(run())


def ask_together(url: str, cases: Sequence[Case], at_a_time: int | None = None, **fields: Any) -> list[dict[str, Any]]:
    """A router's answers in the order of the cases."""
    return complete_together(url, [completion_body(c.adapter, c.prompt_ids, **fields) for c in cases], at_a_time)


def check_together(url: str, cases: Sequence[Case], at_a_time: int | None = None, **fields: Any) -> float:
    """A router's answers are the reference's; returns the largest difference of a log-probability, if it gives any."""
    worst = 0.0
    for case, answer in zip(cases, ask_together(url, cases, at_a_time, **fields), strict=True):
        if fields.get("max_tokens") != 0:
            check_tokens(case, answer)
        if "logprobs" in fields:
            worst = max(worst, check_logprobs(case, answer, of_prompt_only=fields.get("max_tokens") == 0))
    return worst


def check_tokens(case: Case, answer: dict[str, Any]) -> None:
    """The greedy tokens are the reference's."""
    assert answer["choices"][0]["token_ids"] == case.reference["tokens"], case.name


def check_logprobs(case: Case, answer: dict[str, Any], *, of_prompt_only: bool = False) -> float:
    """Log-probabilities of prompt and answer are the reference's within tolerance; returns the largest difference."""
    found = answer["choices"][0]["logprobs"]["token_logprobs"]
    wanted = case.reference["prompt_logprobs"] + ([] if of_prompt_only else case.reference["logprobs"])
    assert len(found) == len(wanted), f"{case.name}: {len(found)} log-probabilities, not {len(wanted)}"
    assert found[0] is None
    difference = max((abs(f - w) for f, w in zip(found[1:], wanted[1:], strict=True)), default=0.0)
    assert difference <= LOGPROB_TOLERANCE, f"{case.name}: log-probabilities differ by {difference}"
    return difference


def check_embedding(case: Case, post: Callable[[dict[str, Any]], httpx.Response]) -> float:
    """/v1/embeddings gives the reference's vector, twice in one request; returns the largest difference of a number."""
    worst = 0.0
    named = {} if case.adapter is None else {"adapter": case.adapter}
    answer = post({"model": "demo", "input": [list(case.prompt_ids)] * 2, **named})
    assert answer.status_code == 200, f"{case.name}: {answer.text}"
    for found in answer.json()["data"]:
        worst = max(worst, _most(found["embedding"], case.reference["embedding"]))
        assert worst <= EMBEDDING_TOLERANCE, f"{case.name}: a vector differs by {worst}"
    assert answer.json()["usage"]["total_tokens"] == 2 * len(case.prompt_ids)
    return worst


def check_adapters_matter(cases: Iterable[Case]) -> None:
    """Log-probabilities and vectors of the reference under two adapters, or under one and none, are not the same."""
    by_prompt: dict[tuple[int, ...], list[Case]] = {}
    for case in cases:
        # Of one token attention reads that token only, whatever an adapter makes of the query.
        if case.adapter != "zero" and len(case.prompt_ids) > 1:
            by_prompt.setdefault(case.prompt_ids, []).append(case)
    for one, other in chain.from_iterable(combinations(group, 2) for group in by_prompt.values()):
        turned = _most(one.reference["embedding"], other.reference["embedding"])
        assert turned > 10 * EMBEDDING_TOLERANCE, f"{one.name}, {other.name}: the vectors are the same"
        changed = _most(one.reference["prompt_logprobs"][1:], other.reference["prompt_logprobs"][1:])
        assert changed > 10 * LOGPROB_TOLERANCE, f"{one.name}, {other.name}: the log-probabilities are the same"


def _most(some: list[float], others: list[float]) -> float:
    """The largest difference of two numbers."""
    return max(abs(a - b) for a, b in zip(some, others, strict=True))
