"""What counts as a grammar, and how much an answer can have."""

from __future__ import annotations

import msgspec
import pytest

from router.protocol.field_values import Limits
from router.protocol.validation import Endpoint, validate
from router.quotas.request_use import grammar_of, most_output_tokens, use_of


@pytest.mark.parametrize(
    ("tools", "counts"),
    [
        (rb'[{"function": {"name": "a", "strict": true}}]', True),
        (rb'[{"function": {"name": "a", "\u0073trict": true}}]', True),
        (rb'[{"function": {"name": "a", "str\u0069c\u0074": true}}]', True),
        (rb'[{"function": {"name": "a", "description": "f\u00fcr"}}]', False),
    ],
)
def test_strict_tools_count_however_they_are_written(tools: bytes, counts: bool):
    assert (grammar_of({"tools": msgspec.Raw(tools)}) is not None) == counts


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({}, None),
        ({"max_tokens": 80}, 160),
        ({"max_completion_tokens": 1}, 2),
        ({"max_completion_tokens": 1, "max_tokens": 80}, 160),  # engines heed `max_tokens` only in completions
    ],
)
def test_the_output_of_two_choices(limits: dict[str, int], most: int | None):
    body = msgspec.json.encode({"model": "m", "prompt": "Hi", "n": 2, "stream": True, **limits})
    validated = validate(Endpoint.COMPLETIONS, body, Limits(128, 32_000))
    assert most_output_tokens(validated) == most
    assert use_of(validated, 1).output_tokens == (512 if most is None else most)
