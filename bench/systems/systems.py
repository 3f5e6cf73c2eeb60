"""The systems that benchmarks compare, each behind the client of `prelude bench load`. Every answer is checked."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.errors import WrongAnswer
from bench.load.client import Client
from bench.load.options import Endpoint
from bench.workloads import session
from bench.workloads.lengths import FixedLengths
from bench.workloads.workload import Stream, Workload

SERVED_MODEL = "bench"
_CHECKED_PROMPT, _CHECKED_ANSWER = 32, 4  # tokens


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `adapter` counts from 0; None is the base model."""

    prompt: Sequence[int]
    adapter: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A checked answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the tokens; empty unless requested
    num_cached_tokens: int  # of the prompt, found in the prefix cache


class System(Protocol):
    """One system under load."""

    @property
    def name(self) -> str: ...

    async def send(self, request: Request, num_tokens: int, with_logprobs: bool = False) -> Answer:
        """Generate `num_tokens` tokens. Raises SystemFailed or WrongAnswer."""


class CalledSystem:
    """A system at an endpoint: one engine, a pair of engines or a router. `client` must be entered before requests."""

    def __init__(self, name: str, endpoint: Endpoint) -> None:
        self.name = name
        self.client = Client(endpoint, time.perf_counter)

    async def send(self, request: Request, num_tokens: int, with_logprobs: bool = False) -> Answer:
        content = {
            "prompt": list(request.prompt),
            "return_token_ids": True,
            **({"logprobs": 1} if with_logprobs else {}),
        }
        asked = session.Request(session.COMPLETIONS, content, num_tokens, prompt_tokens=len(request.prompt))
        return checked(await self.client.complete(asked, request.adapter), len(request.prompt), num_tokens)


def checked(answer: dict[str, Any], prompt_tokens: int, generated_tokens: int) -> Answer:
    """The answer, if it has the requested length. Raises WrongAnswer."""
    usage = answer.get("usage") or {}
    found = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if found != (prompt_tokens, generated_tokens):
        raise WrongAnswer(
            f"asked for {generated_tokens} tokens after {prompt_tokens}, got {found[1]} after {found[0]}: "
            f"{str(answer)[:300]}"
        )
    details = usage.get("prompt_tokens_details") or {}
    tokens = answer["choices"][0].get("token_ids") or ()
    if len(tokens) != generated_tokens:
        raise WrongAnswer(f"asked for {generated_tokens} tokens, got the ids of {len(tokens)}")
    logprobs = (answer["choices"][0].get("logprobs") or {}).get("token_logprobs") or ()
    return Answer(tuple(tokens), tuple(logprobs), details.get("cached_tokens") or 0)


async def check_that_adapters_act(system: System, adapters: Iterable[int], vocabulary: int) -> None:
    """Check that the base model and each of these adapters give different answers to one prompt. Raises WrongAnswer.

    A silently dropped adapter would look fast. Requests run one at a time and the answers include log-probabilities:
    without batching they are the same to the last bit unless an adapter changes them.
    """
    if system.name == "none":
        return
    workload = Workload("check", "", "", lengths=FixedLengths(_CHECKED_PROMPT, _CHECKED_ANSWER), vocabulary=vocabulary)
    prompt = Stream(workload, 0, 0).session(0).requests[0].content["prompt"]
    answers: set[tuple[Any, ...]] = set()
    asked = (None, *adapters)
    for adapter in asked:
        answer = await system.send(Request(prompt, adapter), _CHECKED_ANSWER, with_logprobs=True)
        if len(answer.logprobs) != _CHECKED_ANSWER:
            raise WrongAnswer(
                f"{system.name}: asked for {_CHECKED_ANSWER} log-probabilities, got {len(answer.logprobs)}"
            )
        answers.add((answer.tokens, answer.logprobs))
    if len(answers) != len(asked):
        raise WrongAnswer(
            f"{system.name}: the base model and {len(asked) - 1} adapters gave {len(answers)} different answers to one "
            f"prompt, not {len(asked)}"
        )
