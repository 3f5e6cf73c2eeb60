"""`echo` with `logprobs`: the prompt's log-probabilities are computed at prefill, decode's answer has none of them.

A unified worker's answer has all of them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.protocol.request_body import Fields

_object = msgspec.json.Decoder(Fields)
_choices = msgspec.json.Decoder(list[Fields])


def with_prompt_logprobs(decode_answer: bytes, prefill_answer: bytes) -> bytes:
    """Decode's answer, its logprobs preceded by those of the prompt.

    Prefill's lists have an entry for each of the prompt's tokens and one for the first generated token, which
    decode's lists begin with. Without alternatives asked for, `top_logprobs` is empty on both sides.
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
    """A unified worker's answer, for a client who asked for 0 alternatives where the engine had to be asked for 1."""
    parsed = _object.decode(answer)
    choice = _choices.decode(parsed["choices"])[0]
    logprobs = {**msgspec.json.decode(choice["logprobs"]), "top_logprobs": []}
    choice["logprobs"] = msgspec.Raw(msgspec.json.encode(logprobs))
    return _with_choice(parsed, choice)


def _with_choice(answer: Fields, choice: Fields) -> bytes:
    return msgspec.json.encode({**answer, "choices": msgspec.Raw(msgspec.json.encode([choice]))})
