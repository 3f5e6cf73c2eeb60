"""Waits for what other threads, processes and tasks bring about."""

import asyncio
import time
from collections.abc import Callable
from typing import Any


def wait_until(is_so: Callable[[], Any], within_s: float = 120.0) -> float:
    """The seconds that took. Raises TimeoutError."""
    started_at = time.monotonic()
    while not is_so():
        if time.monotonic() - started_at > within_s:
            raise TimeoutError(f"not within {within_s:g} s")
        time.sleep(0.01)
    return time.monotonic() - started_at


async def until(is_so: Callable[[], Any], within_s: float = 120.0) -> None:
    async with asyncio.timeout(within_s):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
