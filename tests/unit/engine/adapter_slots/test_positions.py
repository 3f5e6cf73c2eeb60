"""Splitting a batch into segments by position."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine.adapter_slots.positions import Span, segments_of

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
