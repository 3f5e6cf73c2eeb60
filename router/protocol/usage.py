"""The usage event: the last event of a stream before [DONE], if requested, with the engine's token counts."""

from __future__ import annotations

import re

import msgspec

# How events end whose last one is the usage event, and few others: most have no counts. A cheap check for every event.
USAGE_END = b"}}\n\n"

# Unescaped quotes, so no generated text can contain it. Every event of a choice has one in its list.
_NO_CHOICES = b'"choices":[]'


_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":(\d+)')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')


class Usage(msgspec.Struct):
    """Token counts of one sequence or of all."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: dict[str, int | None] | None = None
    reasoning_tokens: int | None = 0


class _Event(msgspec.Struct):
    usage: Usage | None = None


_event = msgspec.json.Decoder(_Event)


def take_usage(events: bytes, *, keeps: bool) -> tuple[bytes, Usage | None]:
    """The events, without the usage event unless `keeps`, and the usage event's counts; None if there is none."""
    found = events.rfind(_NO_CHOICES)
    if found < 0:
        return events, None
    before = events.rfind(b"\n\n", 0, found)
    start, end = 0 if before < 0 else before + 2, events.find(b"\n\n", found) + 2
    try:
        usage = _event.decode(events[start:end].removeprefix(b"data: ")).usage
    except msgspec.DecodeError:  # nothing that an engine sends; the stream need not end for it
        return events, None
    if usage is None or keeps:
        return events, usage
    return events[:start] + events[end:], usage


def answer_counts(answer: bytes) -> tuple[int | None, int | None]:
    """The tokens of the prompts and of the output, as a whole answer has them."""
    prompt, completion = _PROMPT_TOKENS.search(answer), _COMPLETION_TOKENS.search(answer)
    return None if prompt is None else int(prompt[1]), None if completion is None else int(completion[1])
