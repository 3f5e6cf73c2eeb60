"""Which requests need steps of one token."""

from types import SimpleNamespace

import pytest

from engine.hooks.requests.tokens import field_for_single_tokens

UNUSED = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "min_p": 0.0,
}


def test_most_requests_do_not():
    assert field_for_single_tokens(SimpleNamespace(**UNUSED, temperature=0.7, top_p=0.9)) is None


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("frequency_penalty", -0.1, "frequency_penalty"),
        ("presence_penalty", 2.0, "presence_penalty"),
        ("repetition_penalty", 0.9, "repetition_penalty"),
        ("min_new_tokens", 1, "min_tokens"),  # as clients call it
        ("min_p", 0.01, "min_p"),
    ],
)
def test_the_first_such_field_is_named(field: str, value: float, named: str):
    assert field_for_single_tokens(SimpleNamespace(**{**UNUSED, field: value})) == named
