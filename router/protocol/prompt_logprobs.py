"""`echo` with `logprobs`: adds the prompt's log-probabilities of the prefill answer to the decode answer.

A unified worker's answer has both already.
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.protocol.request_body import Fields

_object = msgspec.json.Decoder(Fields)
_choices = msgspec.json.Decoder(list[Fields])


def with_prompt_logprobs(decode_answer: bytes, prefill_answer: bytes) -> bytes:
    """Decode's answer with the prompt's logprobs prepended to its own.

    Prefill's lists have [num_prompt_tokens + 1] entries; the last one is of the first generated token, which is
    also the first entry of decode's lists. If the client wants no alternatives, both `top_logprobs` are empty.
    """
    answer = _object.decode(decode_answer)
    choice = _choices.decode(answer["choices"])[0]
    prefill_choice = _choices.decode(_object.decode(prefill_answer)["choices"])[0]
    generated: dict[str, Any] = msgspec.json.decode(choice["logprobs"])
    prompt: dict[str, Any] = msgspec.json.decode(prefill_choice["logprobs"])
    merged = dict(generated)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        of_generated = generated.get(name) or []
        if name != "top_logprobs" or of_generated:
            merged[name] = (prompt.get(name) or [])[:-1] + of_generated
    choice["logprobs"] = msgspec.Raw(msgspec.json.encode(merged))
    return _with_choice(answer, choice)


def without_alternatives(answer: bytes) -> bytes:
    """A unified worker's answer without alternatives, for `logprobs` = 0, for which the engine is sent 1."""
    parsed = _object.decode(answer)
    choice = _choices.decode(parsed["choices"])[0]
    logprobs = {**msgspec.json.decode(choice["logprobs"]), "top_logprobs": []}
    choice["logprobs"] = msgspec.Raw(msgspec.json.encode(logprobs))
    return _with_choice(parsed, choice)


def _with_choice(answer: Fields, choice: Fields) -> bytes:
    return msgspec.json.encode({**answer, "choices": msgspec.Raw(msgspec.json.encode([choice]))})
