"""Log-probabilities of completions: `echo` with `logprobs`, and `max_tokens` = 0.

A decode worker's answer lacks the prompt's log-probabilities, so they are taken from the prefill worker's answer. A
unified worker's answer has both.
"""

from typing import Any

import msgspec

from router.protocol.field_values import encoded
from router.protocol.request_body import Fields

_object = msgspec.json.Decoder(Fields)
_choices = msgspec.json.Decoder(list[Fields])


def with_prompt_logprobs(decode_answer: bytes, prefill_answer: bytes) -> bytes:
    """Decode's answer with the prompt's logprobs prepended to its own.

    Prefill's lists have [num_prompt_tokens + 1] entries; the last one is of the first generated token, which is
    also the first entry of decode's lists.
    """
    answer = _object.decode(decode_answer)
    choice = _choices.decode(answer["choices"])[0]
    prefill_choice = _choices.decode(_object.decode(prefill_answer)["choices"])[0]
    generated: dict[str, Any] = msgspec.json.decode(choice["logprobs"])
    prompt: dict[str, Any] = msgspec.json.decode(prefill_choice["logprobs"])
    merged = dict(generated)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        merged[name] = (prompt.get(name) or [])[:-1] + (generated.get(name) or [])
    choice["logprobs"] = encoded(merged)
    return _with_choice(answer, choice)


def without_alternatives(answer: bytes) -> bytes:
    """The answer without alternatives, for `logprobs` = 0, for which engines are sent 1."""
    parsed = _object.decode(answer)
    choice = _choices.decode(parsed["choices"])[0]
    logprobs = {**msgspec.json.decode(choice["logprobs"]), "top_logprobs": []}
    choice["logprobs"] = encoded(logprobs)
    return _with_choice(parsed, choice)


def without_generated_token(answer: bytes, echoed: str) -> bytes:
    """The answer for `max_tokens` = 0, made from an answer for 1, which is what engines are asked for.

    `echoed` is the choice's text: the prompt's, or empty.
    """
    parsed = _object.decode(answer)
    choice = _choices.decode(parsed["choices"])[0]
    choice |= {"text": encoded(echoed), "finish_reason": encoded("length"), "matched_stop": encoded(None)}
    if bytes(choice.get("token_ids", b"null")) != b"null":
        choice["token_ids"] = encoded([])
    if (logprobs := msgspec.json.decode(choice["logprobs"])) is not None:
        lists = {name: values[:-1] if isinstance(values, list) else values for name, values in logprobs.items()}
        choice["logprobs"] = encoded(lists)
    usage: dict[str, Any] = msgspec.json.decode(parsed["usage"])
    usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    return _with_choice({**parsed, "usage": encoded(usage)}, choice)


def _with_choice(answer: Fields, choice: Fields) -> bytes:
    return msgspec.json.encode({**answer, "choices": encoded([choice])})
