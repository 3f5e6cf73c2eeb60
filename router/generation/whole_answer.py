"""Completes the answer of a sequence that is not streamed: prompt log-probabilities, echoed prompt."""

import msgspec

from router.generation.attempt import Attempt, PairAttempt
from router.generation.backends import Backends
from router.generation.request import Request
from router.generation.tokenizer_calls import detokenized
from router.protocol.completion_logprobs import (
    with_prompt_logprobs,
    without_alternatives,
    without_generated_token,
)
from router.protocol.validation import Sequence


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
    return await detokenized(backends, prompt, request.next_rid("detok-"))
