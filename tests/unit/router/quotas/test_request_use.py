"""What counts as a grammar."""

from __future__ import annotations

import msgspec
import pytest

from router.quotas.request_use import grammar_of


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
