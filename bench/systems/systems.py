"""The systems that benchmarks compare, behind the client of `prelude bench load`, and whether their adapters act."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from bench.errors import WrongAnswer
from bench.load.client import Client
from bench.load.options import Endpoint
from bench.workloads.lengths import FixedLengths
from bench.workloads.session import COMPLETIONS, Request
from bench.workloads.workload import Stream, Workload

SERVED_MODEL = "bench"
_CHECKED_PROMPT, _CHECKED_ANSWER = 32, 4  # tokens
Answer = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, and their log-probabilities


async def ask(client: Client, prompt: Sequence[int], adapter: int | None, num_tokens: int) -> Answer:
    """Generate `num_tokens` tokens; `adapter` counts from 0, None is the base model.

    Raises SystemFailed or WrongAnswer.
    """
    content = {"prompt": list(prompt), "return_token_ids": True, "logprobs": 1}
    request = Request(COMPLETIONS, content, num_tokens, prompt_tokens=len(prompt))
    return checked(await client.complete(request, adapter), len(prompt), num_tokens)


def checked(answer: dict[str, Any], prompt_tokens: int, generated_tokens: int) -> Answer:
    """The answer, if it has the requested length. Raises WrongAnswer."""
    usage = answer.get("usage") or {}
    found = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if found != (prompt_tokens, generated_tokens):
        raise WrongAnswer(
            f"asked for {generated_tokens} tokens after {prompt_tokens}, got {found[1]} after {found[0]}: "
            f"{str(answer)[:300]}"
        )
    tokens = answer["choices"][0].get("token_ids") or ()
    logprobs = (answer["choices"][0].get("logprobs") or {}).get("token_logprobs") or ()
    if not len(tokens) == len(logprobs) == generated_tokens:
        raise WrongAnswer(
            f"asked for {generated_tokens} tokens, got the ids of {len(tokens)} and {len(logprobs)} log-probabilities"
        )
    return tuple(tokens), tuple(logprobs)


async def check_that_adapters_act(name: str, endpoint: Endpoint, adapters: Iterable[int], vocabulary: int) -> None:
    """Check that the base model and each of these adapters give different answers to one prompt. Raises WrongAnswer.

    A silently dropped adapter would look fast. Requests run one at a time and the answers include log-probabilities:
    without batching they are the same to the last bit unless an adapter changes them.
    """
    if name == "none":
        return
    workload = Workload("check", "", "", lengths=FixedLengths(_CHECKED_PROMPT, _CHECKED_ANSWER), vocabulary=vocabulary)
    prompt = Stream(workload, 0, 0).session(0).requests[0].content["prompt"]
    asked = (None, *adapters)
    async with Client(endpoint, time.perf_counter) as client:
        answers = {await ask(client, prompt, adapter, _CHECKED_ANSWER) for adapter in asked}
    if len(answers) != len(asked):
        raise WrongAnswer(
            f"{name}: the base model and {len(asked) - 1} adapters gave {len(answers)} different answers to one "
            f"prompt, not {len(asked)}"
        )
