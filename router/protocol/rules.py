"""The admission contract: every field that a generation request may have, and the values that it may take.

Any other field is a 400 that names it. docs/api.md has a table of them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from router.errors import InvalidField
from router.protocol.field_values import (
    Limits,
    boolean,
    check_token_id_field,
    check_token_ids,
    decoded,
    encoded,
    integer,
    number,
    shown,
)
from router.protocol.grammars import check_regex_field, check_response_format
from router.protocol.messages import check_messages, check_template_kwargs, check_tools, required_call
from router.protocol.request_body import Fields

# Limits of numbers that the engine puts into tensors unchecked; a larger one would crash its scheduler.
INT32_MAX = 2**31 - 1
INTEGERS = {
    "max_completion_tokens": (1, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
    "top_k": (-1, INT32_MAX),
    "seed": (-(2**62), 2**62),
}
NUMBERS = {  # (least, most, must be above the least)
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.01, 2.0, False),  # logits are divided by it; by 1e-40 they would be infinite
}
BOOLEANS = (
    "stream", "echo", "ignore_eos", "no_stop_trim", "skip_special_tokens", "separate_reasoning", "stream_reasoning",
    "return_cached_tokens_details", "return_token_ids", "return_prompt_token_ids", "parallel_tool_calls",
    "continue_final_message", "store",
)  # fmt: skip
TEXTS = {  # bytes
    "user": 1024, "task": 32, "service_tier": 64, "safety_identifier": 1024, "prompt_cache_key": 1024,
    "prompt_cache_retention": 64, "verbosity": 64,
}  # fmt: skip
OBJECTS = {"metadata": 16 * 1024, "prediction": 256 * 1024, "reasoning": 1024}  # bytes
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_EFFORT = 0.99
MAX_LOGIT_BIAS = 100.0  # as OpenAI's
MAX_TOP_LOGPROBS = 20  # as OpenAI's

# Raises InvalidField; may put the engines' form of the value in its place.
Check = Callable[[Fields, str, Limits], Any]


def _boolean(fields: Fields, name: str, _: Limits) -> None:
    boolean(fields, name)


def _text(most: int, fields: Fields, name: str, _: Limits) -> None:
    value = decoded(fields, name, str, "a string")
    if len(memoryview(fields[name])) > most + 2 and len(value.encode()) > most:
        raise InvalidField(f"{name} has over {most} bytes, which is the most that is accepted", param=name)


def _object(most: int, fields: Fields, name: str, _: Limits) -> None:
    if len(memoryview(fields[name])) > most:
        raise InvalidField(f"{name} has over {most} bytes, which is the most that is accepted", param=name)
    decoded(fields, name, dict[str, msgspec.Raw], "an object")


def _integer(least: int, most: int, fields: Fields, name: str, _: Limits) -> None:
    integer(fields, name, least, most)


def _top_k(fields: Fields, name: str, _: Limits) -> None:
    if integer(fields, name, *INTEGERS[name]) == 0:
        fields[name] = msgspec.Raw(b"-1")  # both mean all tokens; engines know -1 alone


def _number(least: float, most: float, is_above: bool, fields: Fields, name: str, _: Limits) -> None:
    number(fields, name, least, most, is_above=is_above)


def _stop(fields: Fields, name: str, limits: Limits) -> None:
    raw, most = fields[name], limits.request
    if len(memoryview(raw)) > 6 * most.stop_bytes + 16 * most.stops + 16:  # before it is decoded
        raise InvalidField(f"{name} is too long: at most {most.stop_bytes} bytes are accepted", param=name)
    found = decoded(fields, name, str | list[str], "a string or a list of strings")
    texts = [found] if isinstance(found, str) else found
    if len(texts) > most.stops:
        raise InvalidField(f"{name} has {len(texts)} strings; at most {most.stops} are accepted", param=name)
    if "" in texts:  # every text has it
        raise InvalidField(f"{name} must have no empty string (found {shown(raw)})", param=name)
    if (size := sum(len(text.encode()) for text in texts)) > most.stop_bytes:
        raise InvalidField(f"{name} has {size} bytes; at most {most.stop_bytes} are accepted", param=name)


def _stop_token_ids(fields: Fields, name: str, limits: Limits) -> None:
    if len(memoryview(fields[name])) <= 32 * limits.request.stop_token_ids + 16:  # before it is decoded
        ids = decoded(fields, name, list[int], "a list of token ids")
        if len(ids) <= limits.request.stop_token_ids:
            check_token_ids(name, ids, limits)
            return
    raise InvalidField(f"{name} may have at most {limits.request.stop_token_ids} token ids", param=name)


def _logit_bias(fields: Fields, name: str, limits: Limits) -> None:
    most = limits.request.logit_bias
    if len(memoryview(fields[name])) > 64 * most + 16:  # before it is decoded
        raise InvalidField(f"{name} may have at most {most} token ids", param=name)
    biases = decoded(fields, name, dict[str, float], "an object of token ids and numbers")
    if len(biases) > most:
        raise InvalidField(f"{name} has {len(biases)} token ids; at most {most} are accepted", param=name)
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) < 12 and int(token) < limits.vocabulary):
            raise InvalidField(f"{name}: {token[:40]!r} is no token id in [0, {limits.vocabulary})", param=name)
        if not abs(bias) <= MAX_LOGIT_BIAS:
            raise InvalidField(
                f"{name} values must be from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g} (found {bias:g})", param=name
            )


def _effort(fields: Fields, name: str, _: Limits) -> None:
    expected = f"one of {', '.join(EFFORTS)}, or a number from 0 to {MAX_EFFORT}"
    value = decoded(fields, name, str | float, expected)
    if value not in EFFORTS if isinstance(value, str) else not 0 <= value <= MAX_EFFORT:
        raise InvalidField(f"{name} must be {expected} (found {shown(fields[name])})", param=name)


class _Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | float | None = None
    reasoning_effort: str | float | None = None
    enabled: bool | None = None
    enable: bool | None = None
    exclude: bool | None = None
    max_tokens: int | None = None
    summary: str | None = None


def _reasoning(fields: Fields, name: str, limits: Limits) -> None:
    found = decoded(fields, name, _Reasoning, "an object with effort and enabled")
    for effort in (found.effort, found.reasoning_effort):
        if effort is not None:
            _effort({name: encoded(effort)}, name, limits)


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def includes_usage(fields: Fields, is_streaming: bool) -> bool:
    """Whether the client wants a usage event at the stream's end. Raises InvalidField."""
    if "stream_options" not in fields:
        return False
    options = stream_options(fields, _StreamOptions, 'an object such as {"include_usage": true}', is_streaming)
    return options is not None and bool(options.include_usage)


def stream_options(fields: Fields, kind: Any, expected: str, is_streaming: bool) -> Any:
    """The decoded stream options; None if they are absent. Raises InvalidField."""
    if "stream_options" in fields and not is_streaming:
        raise InvalidField("stream_options needs stream: true; remove it or set stream", param="stream_options")
    return decoded(fields, "stream_options", kind, expected)


def _modalities(fields: Fields, name: str, _: Limits) -> None:
    if decoded(fields, name, list[str], "a list of strings") != ["text"]:
        raise InvalidField(f'{name} must be ["text"] (found {shown(fields[name])})', param=name)


_NEEDED_BY_ENDPOINTS = (
    "prompt", "suffix", "model", "adapter", "adapter_scale", "n", "best_of", "max_tokens", "logprobs", "top_logprobs",
    "stream_options",
)  # fmt: skip


def _is_checked_elsewhere(_fields: Fields, _name: str, _limits: Limits) -> None:
    """No check here: the endpoint checks the field, because it needs the value."""


RULES: Mapping[str, Check] = {
    **{name: partial(_integer, *each) for name, each in INTEGERS.items()},
    **{name: partial(_number, *each) for name, each in NUMBERS.items()},
    **dict.fromkeys(BOOLEANS, _boolean),
    **{name: partial(_text, most) for name, most in TEXTS.items()},
    **{name: partial(_object, most) for name, most in OBJECTS.items()},
    "top_k": _top_k,
    "reasoning": _reasoning,
    "reasoning_effort": _effort,
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "logit_bias": _logit_bias,
    "response_format": check_response_format,
    "regex": check_regex_field,
    "tools": check_tools,
    "tool_choice": lambda fields, _name, _limits: required_call(fields),
    "chat_template_kwargs": check_template_kwargs,
    "messages": lambda fields, _name, limits: check_messages(fields, limits),
    "input_ids": check_token_id_field,
    "modalities": _modalities,
    **dict.fromkeys(_NEEDED_BY_ENDPOINTS, _is_checked_elsewhere),
}
