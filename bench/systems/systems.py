"""The systems that benchmarks compare, each behind the client of `prelude bench load`. Every answer is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.errors import WrongAnswer
from bench.load.client import Client
from bench.load.options import Endpoint
from bench.load.strict import stopwatch
from bench.workloads import session

SYSTEMS = ("none", "stock", "unified_lora", "unified_direft", "pd")
HAVE_BASELINE = ("none", "pd")  # measured with requests for the base model, too
SERVED_MODEL = "bench"


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
        self.client = Client(endpoint, stopwatch())

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
