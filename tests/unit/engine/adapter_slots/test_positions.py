"""Splitting a batch into segments by position."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.adapter_slots.positions import Segment, Span, segments_of


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([Span(None, False, 5, 0, 5)], [Segment(None, 5)]),
        ([Span("a", False, 5, 0, 5)], [Segment("a", 5)]),
        # a chunk in the middle of a prompt
        ([Span("a", False, 9, 3, 6)], [Segment("a", 3)]),
        # decode: the token behind the prompt
        ([Span("a", False, 5, 5, 6)], [Segment(None, 1)]),
        ([Span("a", True, 5, 5, 6)], [Segment("a", 1)]),
        # a retracted request reads its prompt and its answer again
        ([Span("a", False, 5, 0, 9)], [Segment("a", 5), Segment(None, 4)]),
        ([Span("a", True, 5, 0, 9)], [Segment("a", 9)]),
        ([Span("a", False, 5, 7, 9)], [Segment(None, 2)]),
        # neighbours under the same adapter are one
        ([Span("a", False, 5, 0, 5), Span("a", False, 3, 0, 3)], [Segment("a", 8)]),
        ([Span("a", False, 2, 0, 3), Span(None, False, 4, 0, 4)], [Segment("a", 2), Segment(None, 5)]),
        ([Span("a", False, 5, 0, 5), Span("b", False, 3, 0, 3)], [Segment("a", 5), Segment("b", 3)]),
    ],
)
def test_segments(spans, expected):
    assert segments_of(spans) == tuple(expected)


SPANS = st.builds(
    lambda adapter, everywhere, prompt, begin, n: Span(adapter, everywhere, prompt, begin, begin + n),
    st.sampled_from([None, "a", "b"]),
    st.booleans(),
    st.integers(1, 20),
    st.integers(0, 20),
    st.integers(1, 20),
)


@given(st.lists(SPANS, max_size=6))
def test_every_token_is_where_it_belongs(spans):
    """Compare with the rule, applied token by token."""
    wanted = []
    for span in spans:
        for position in range(span.begin, span.end):
            is_adapted = span.adapter is not None and (span.is_everywhere or position < span.num_prompt_tokens)
            wanted.append(span.adapter if is_adapted else None)
    segments = segments_of(spans)
    assert [segment.adapter for segment in segments for _ in range(segment.num_tokens)] == wanted
    assert all(a.adapter != b.adapter for a, b in itertools.pairwise(segments))
