"""Loads that end at the first failure: concurrency, order, times, what is raised."""

from __future__ import annotations

import asyncio

import pytest
from support.bench.streaming_mock import MockServer

from bench.errors import SystemFailed
from bench.load.options import Endpoint
from bench.load.record import ERROR_ANSWER, Record
from bench.load.strict import closed, closed_load, open_load, requests_per_s
from bench.workloads.session import COMPLETIONS, Request, Session


def sessions(count: int, adapter: int | None = None) -> list[Session]:
    return [
        Session(number, adapter, (Request(COMPLETIONS, {"prompt": [number]}, 2, prompt_tokens=1),))
        for number in range(count)
    ]


def record(session: int, intended_s: float, end_s: float, error: str | None = None) -> Record:
    return Record(session, 0, intended_s, intended_s, end_s, adapter="a7", error=error, status=503, detail="queue full")


@pytest.mark.parametrize(("num_requests", "concurrency", "at_most"), [(10, 3, 3), (2, 8, 2), (5, 1, 1)])
def test_it_keeps_that_many_in_flight_and_takes_requests_in_order(num_requests, concurrency, at_most):
    order, in_flight, largest = [], 0, 0

    async def send(_request, _adapter, due_s, session, _turn):
        nonlocal in_flight, largest
        order.append(session)
        in_flight += 1
        largest = max(largest, in_flight)
        await asyncio.sleep(0)
        in_flight -= 1
        return record(session, due_s, due_s)

    found = asyncio.run(closed(send, sessions(num_requests), concurrency, lambda: 0.0))
    assert order == list(range(num_requests))
    assert largest == at_most
    assert len(found) == num_requests


def test_the_rate_counts_until_the_last_answer():
    seconds = 100.0

    async def send(_request, _adapter, due_s, session, _turn):
        nonlocal seconds
        seconds += 1 + session  # 1, 2, 3, 4 s
        return record(session, due_s, seconds)

    found = asyncio.run(closed(send, sessions(4), 1, lambda: seconds))
    assert [each.e2e_s for each in found] == [1, 2, 3, 4]
    assert requests_per_s(found) == 0.4


@pytest.mark.parametrize("raises", [True, False])
def test_a_failure_ends_the_load_and_is_raised_by_itself(raises: bool):
    cancelled = []

    async def send(_request, _adapter, due_s, session, _turn):
        if session == 1:
            if raises:
                raise ValueError("refused")
            return record(session, due_s, due_s, ERROR_ANSWER)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(session)
            raise

    error, says = (ValueError, "refused") if raises else (SystemFailed, r"a7: queue full \(status 503\)")
    with pytest.raises(error, match=says):
        asyncio.run(closed(send, sessions(100), 3, lambda: 0.0))
    assert sorted(cancelled) == [0, 2]


def test_both_loops_send_through_the_streaming_client():
    server = MockServer()

    async def main() -> tuple[list[Record], list[Record]]:
        async with server.running():
            endpoint = Endpoint(server.url, "mock", ("a0",))
            due = [(each, 0.01 * each.number) for each in sessions(3, adapter=0)]
            return await closed_load(endpoint, sessions(4), 2), await open_load(endpoint, due)

    in_turn, on_time = asyncio.run(main())
    assert sorted(each.session for each in in_turn) == [0, 1, 2, 3]
    sent = {each.session: (each.intended_s, each.adapter) for each in on_time}
    assert sent == {0: (0.0, "a0"), 1: (0.01, "a0"), 2: (0.02, "a0")}
    assert all(each.ttft_s >= 0 and each.output_tokens == 2 for each in (*in_turn, *on_time))
