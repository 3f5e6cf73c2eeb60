"""Closed-loop load: a fixed number of concurrent requests; an answer starts the next one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.measuring.quantile import quantile


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a load. Times are seconds since its start."""

    started_s: tuple[float, ...]  # by request
    ended_s: tuple[float, ...]

    @property
    def num_requests(self) -> int:
        return len(self.ended_s)

    @property
    def duration_s(self) -> float:
        """Until the last answer, so that the tail of a slow batch counts."""
        return max(self.ended_s)

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.duration_s

    def latency_s(self, share: float) -> float:
        """The smallest latency that at least this share of requests did not exceed."""
        return quantile((end - start for start, end in zip(self.started_s, self.ended_s, strict=True)), share)


async def closed_loop(
    send: Callable[[int], Awaitable[None]],
    num_requests: int,
    concurrency: int,
    now: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """Send requests 0, 1, 2, …, at most `concurrency` at a time. Stops at the first failure and raises it."""
    started: list[float] = [0.0] * num_requests
    ended: list[float] = [0.0] * num_requests
    numbers = iter(range(num_requests))
    began = now()

    async def client() -> None:
        for number in numbers:  # shared: each client takes the next one
            started[number] = now() - began
            await send(number)
            ended[number] = now() - began

    clients = [asyncio.create_task(client(), name=f"client {number}") for number in range(concurrency)]
    try:
        await asyncio.gather(*clients)
    finally:
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return LoadResult(tuple(started), tuple(ended))
