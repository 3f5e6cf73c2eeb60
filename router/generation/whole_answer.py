"""Completes the answer of a sequence that is not streamed: prompt log-probabilities, echoed prompt."""

from __future__ import annotations

import asyncio

import msgspec

from router.errors import AttemptError, DeadlineExceeded, NoWorkerAvailable
from router.generation.attempt import Attempt, PairAttempt
from router.generation.backends import Backends
from router.generation.engine_calls import EngineCall
from router.generation.request import Request
from router.protocol.completion_logprobs import (
    with_prompt_logprobs,
    without_alternatives,
    without_generated_token,
)
from router.protocol.validation import Sequence


class _Text(msgspec.Struct):
    text: str | list[str]


async def completed(answer: bytes, backends: Backends, request: Request, sequence: Sequence, attempt: Attempt) -> bytes:
    """The whole answer of a sequence that is not streamed, with prompt log-probabilities. Raises RouterError.

    For embeddings, only the needed part of the engine's answer.
    """
    validated = request.validated
    if validated.prefill_output is not None:
        return answer
    if not validated.generates:
        answer = without_generated_token(answer, await _echoed_text(backends, request, sequence))
    if validated.wants_prompt_logprobs:
        if isinstance(attempt, PairAttempt):
            prefill_answer = await attempt.prefill_answer(backends.config.first_event_timeout_s)
            answer = with_prompt_logprobs(answer, prefill_answer)
        if bytes(sequence.fields["logprobs"]) == b"0":
            answer = without_alternatives(answer)
    return answer


async def _echoed_text(backends: Backends, request: Request, sequence: Sequence) -> str:
    """The text of the prompt as engines echo it; empty without `echo`."""
    prompt = sequence.fields["prompt"]
    if not request.validated.echoes:
        return ""
    if bytes(prompt)[:1] == b'"':
        return msgspec.json.decode(prompt, type=str)
    body = msgspec.json.encode({"tokens": prompt, "skip_special_tokens": True})
    answer = await _ask_tokenizer(backends, body, request.next_rid("detok-"))
    text = msgspec.json.decode(answer, type=_Text).text  # a list for a prompt that is a list of one list
    return text if isinstance(text, str) else "".join(text)


async def _ask_tokenizer(backends: Backends, body: bytes, rid: str) -> bytes:
    """The answer of the least busy engine or, if it fails, of the next one: all have the same tokenizer.

    Raises RouterError.
    """
    fleet = backends.fleet.state
    workers = [worker for worker in fleet.workers.values() if worker.is_placeable]
    workers.sort(key=lambda worker: (fleet.loads[worker.name].num_sequences, worker.name))
    failure: AttemptError | NoWorkerAvailable = NoWorkerAvailable("no worker can take the request now; try again soon")
    try:
        async with asyncio.timeout(backends.config.first_event_timeout_s):
            for worker in workers[: backends.config.max_attempts]:
                in_flight = backends.fleet.loads.add(worker.name)
                call = EngineCall(backends.engines, worker, "/v1/detokenize", body, rid, in_flight)
                watch = backends.fleet.watch(worker, call.fail)  # one that hangs would take all the time
                try:
                    return await call.answer()
                except AttemptError as error:
                    if not error.retryable:
                        raise
                    failure = error
                finally:
                    watch.end()
                    call.leave()
    except TimeoutError:
        raise DeadlineExceeded("no engine's tokenizer answered in time") from None
    raise failure
