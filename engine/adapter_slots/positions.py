"""Splits a batch into segments of adapted and base tokens. Pure, so tests need no engine.

A request's prompt has p tokens. An adapter with positions "prefill" acts on tokens [0, p), one with positions "all"
on every token. This holds wherever the token is computed: in a prefill chunk, in decode, or in the prefill of a
retracted request, which has its own answer behind its prompt.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens [begin, end) of one request that a batch computes; 0 is the request's first token."""

    adapter: str | None  # revision id
    is_everywhere: bool  # positions "all"
    num_prompt_tokens: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of a batch with the same adapter, or with none."""

    adapter: str | None
    num_tokens: int


def segments_of(spans: Iterable[Span]) -> tuple[Segment, ...]:
    """The batch as segments, in token order; adjacent segments of the same adapter are merged."""
    segments: list[Segment] = []
    for span in spans:
        num_tokens = span.end - span.begin
        num_adapted = 0
        if span.adapter is not None:
            last = span.end if span.is_everywhere else min(span.end, span.num_prompt_tokens)
            num_adapted = max(0, last - span.begin)
        for adapter, count in ((span.adapter, num_adapted), (None, num_tokens - num_adapted)):
            if count == 0:
                continue
            if segments and segments[-1].adapter == adapter:
                count += segments.pop().num_tokens
            segments.append(Segment(adapter, count))
    return tuple(segments)
