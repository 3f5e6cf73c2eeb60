"""Waits for what other threads, processes and tasks bring about."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any


def wait_until(is_so: Callable[[], Any], within_s: float = 60.0) -> float:
    """The seconds that took. Raises TimeoutError."""
    started_at = time.monotonic()
    while not is_so():
        if time.monotonic() - started_at > within_s:
            raise TimeoutError(f"not within {within_s:g} s")
        time.sleep(0.01)
    return time.monotonic() - started_at


async def until(is_so: Callable[[], Any], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def meanwhile(*works: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """They run during the block, and have ended after it."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
