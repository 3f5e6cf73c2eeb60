"""A bucket admits what its rate and its capacity permit, and no more."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.quotas.bucket import Bucket
from router.quotas.rate_headers import duration


def test_what_is_given_back_fills_no_more_than_the_bucket():
    bucket = Bucket(rate=10, capacity=100, now=0)
    bucket.take(30)
    bucket.take(-50)
    assert bucket.level == 100
    assert bucket.is_idle


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 300)), min_size=1, max_size=60),
    st.floats(0.5, 100),
    st.floats(1, 200),
)
@settings(max_examples=200)
def test_over_any_time_no_more_than_capacity_and_rate(steps, rate, capacity):
    """But for the excess of the last request, which is owed."""
    bucket, now = Bucket(rate, capacity, 0.0), 0.0
    admitted: list[tuple[float, float]] = []
    for gap, amount in steps:
        now += gap
        bucket.refill(now)
        if not bucket.wait_s:
            bucket.take(amount)
            admitted.append((now, amount))
    for first in range(len(admitted)):
        before = 0.0
        for at, amount in admitted[first:]:
            assert before <= capacity + rate * (at - admitted[first][0]) + 1e-6
            before += amount


@given(st.floats(0.01, 100), st.floats(1, 1000), st.floats(0, 2000))
@settings(max_examples=200)
def test_after_the_wait_a_request_is_admitted(rate, capacity, taken):
    bucket = Bucket(rate, capacity, 0.0)
    bucket.take(taken)
    bucket.refill(bucket.wait_s * (1 + 1e-9) + 1e-6)
    assert bucket.wait_s == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.017, "17ms"), (1, "1s"), (1.5, "1.5s"), (59.5, "59.5s"), (360, "6m0s"), (3725, "1h2m5s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str):
    assert duration(seconds) == text
