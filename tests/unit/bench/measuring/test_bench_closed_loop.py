"""The closed loop: concurrency, order and failures."""

from __future__ import annotations

import asyncio

import pytest

from bench.measuring.closed_loop import LoadResult, closed_loop


class Clock:
    """Time that only the test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize(("num_requests", "concurrency", "at_most"), [(10, 3, 3), (2, 8, 2), (5, 1, 1)])
def test_it_keeps_that_many_in_flight_and_takes_requests_in_order(num_requests, concurrency, at_most):
    order, in_flight, largest = [], 0, 0

    async def send(number: int) -> None:
        nonlocal in_flight, largest
        order.append(number)
        in_flight += 1
        largest = max(largest, in_flight)
        await asyncio.sleep(0)
        in_flight -= 1

    result = asyncio.run(closed_loop(send, num_requests, concurrency))
    assert order == list(range(num_requests))
    assert largest == at_most
    assert result.num_requests == num_requests


def test_rate_and_latency_come_from_the_clock():
    clock = Clock()

    async def send(number: int) -> None:
        clock.seconds += 1 + number  # 1, 2, 3, 4 s

    result = asyncio.run(closed_loop(send, 4, 1, clock))
    assert result.started_s == (0, 1, 3, 6)
    assert result.ended_s == (1, 3, 6, 10)
    assert result.duration_s == 10
    assert result.requests_per_s == 0.4


@pytest.mark.parametrize(("quantile", "expected"), [(0, 1), (0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3), (1, 4)])
def test_quantiles(quantile, expected):
    assert LoadResult((0, 0, 0, 0), (4, 2, 1, 3)).latency_s(quantile) == expected


def test_a_failure_ends_the_load_and_is_raised():
    cancelled = []

    async def send(number: int) -> None:
        if number == 1:
            raise ValueError("refused")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    with pytest.raises(ValueError, match="refused"):
        asyncio.run(closed_loop(send, 100, 3))
    assert cancelled == [0, 2]
