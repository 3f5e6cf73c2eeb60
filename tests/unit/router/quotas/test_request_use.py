"""How much an answer can have."""

from __future__ import annotations

import msgspec
import pytest

from router.protocol.field_values import Limits
from router.protocol.validation import Endpoint, validate
from router.quotas.budget import Use


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
    assert validated.most_output_tokens == most
    assert Use.of(validated, 1).output_tokens == (512 if most is None else most)
