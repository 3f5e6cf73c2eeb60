"""The breaker of one worker: closed, open, half open. Under a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from support.routers.virtual_time import run_in_virtual_time

from router.fleet.lost_workers import Breaker


def run(scenario: Callable[[Breaker, list[bool]], Awaitable[None]]) -> None:
    async def start() -> None:
        seen: list[bool] = []
        breaker = Breaker("w", lambda: seen.append(breaker.is_blocking))
        await scenario(breaker, seen)

    run_in_virtual_time(start())


def fail(breaker: Breaker, times: int = 3) -> None:
    for _ in range(times):
        breaker.failed()


def test_failures_in_a_row_open_it_for_a_rest():
    async def scenario(breaker: Breaker, seen: list[bool]) -> None:
        fail(breaker, 2)
        breaker.succeeded()
        fail(breaker, 2)
        assert not breaker.is_blocking
        breaker.failed()
        assert breaker.is_blocking
        fail(breaker, 9)  # calls that had begun before
        await asyncio.sleep(0.99)
        assert breaker.is_blocking
        await asyncio.sleep(0.02)
        assert seen == [True, False]

    run(scenario)


def test_one_probe_decides():
    async def scenario(breaker: Breaker, seen: list[bool]) -> None:
        fail(breaker)
        await asyncio.sleep(1.01)
        breaker.placed()
        assert breaker.is_blocking  # for all others
        breaker.succeeded()
        assert not breaker.is_blocking
        fail(breaker, 2)
        assert not breaker.is_blocking  # it counts from zero

    run(scenario)


def test_each_failed_probe_doubles_the_rest():
    async def scenario(breaker: Breaker, seen: list[bool]) -> None:
        fail(breaker)
        rests = []
        for _ in range(5):
            began_at = asyncio.get_running_loop().time()
            while breaker.is_blocking:  # noqa: ASYNC110 under a virtual clock
                await asyncio.sleep(0.01)
            rests.append(round(asyncio.get_running_loop().time() - began_at))
            breaker.placed()
            breaker.failed()
        assert rests == [1, 2, 4, 8, 8]

    run(scenario)


def test_a_probe_whose_client_leaves_is_followed_by_another_one():
    async def scenario(breaker: Breaker, seen: list[bool]) -> None:
        fail(breaker)
        await asyncio.sleep(1.01)
        breaker.placed()
        await asyncio.sleep(2.01)
        assert not breaker.is_blocking
        breaker.placed()
        assert breaker.is_blocking

    run(scenario)


def test_another_engine_starts_closed():
    async def scenario(breaker: Breaker, seen: list[bool]) -> None:
        fail(breaker)
        breaker.reset()
        assert not breaker.is_blocking
        await asyncio.sleep(5)
        assert seen == [True, False]

    run(scenario)


def test_transfers_that_fail_at_once_count_once():
    async def scenario(breaker: Breaker, seen: list[bool]) -> None:
        for _ in range(2):
            for _ in range(32):  # all that were under way to a peer that ends
                breaker.transfer_failed()
            await asyncio.sleep(0.6)
        assert not breaker.is_blocking
        breaker.transfer_failed()
        assert breaker.is_blocking

    run(scenario)
