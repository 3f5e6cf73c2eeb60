"""Blocking work beside the event loop. A piece of work that is cancelled is stopped and waited for, not left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """Raised in the thread by work that was told to stop."""


class Stop:
    """What long work asks, every few megabytes, to know whether it should go on."""

    def __init__(self) -> None:
        self._event = Event()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raises Stopped."""
        if self._event.is_set():
            raise Stopped


class WorkThreads:
    """A bounded pool of threads."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="residency")

    async def run(self, work: Callable[[Stop], T]) -> T:
        """What `work` returns. Cancellation tells it to stop, and is passed on once it has."""
        stop = Stop()
        future = asyncio.get_running_loop().run_in_executor(self._pool, work, stop)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            stop.set()
            await ended(future)
            raise

    async def run_to_end(self, work: Callable[[], T]) -> T:
        """What short `work` returns, which must not be left undone: cancellation is passed on after it."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await ended(future)
            raise

    async def aclose(self) -> None:
        """Wait for what runs, and end the threads. The event loop goes on: work that hangs must not stop its clock."""
        with ThreadPoolExecutor(1, "close") as closer:
            await asyncio.get_running_loop().run_in_executor(closer, lambda: self._pool.shutdown(cancel_futures=True))


async def ended(future: asyncio.Future[T]) -> None:
    """Wait for a future, however often this is cancelled meanwhile."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()
