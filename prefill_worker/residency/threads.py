"""Blocking work in threads. Cancelled work is stopped and awaited, never abandoned."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """Raised in the thread when work is asked to stop."""


class Stop:
    """A stop request that long work polls, every few megabytes."""

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
        """Run `work` and return its result. Cancellation stops the work, and propagates once it has stopped."""
        stop = Stop()
        future = asyncio.get_running_loop().run_in_executor(self._pool, work, stop)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            stop.set()
            await wait_until_done(future)
            raise

    async def run_to_end(self, work: Callable[[], T]) -> T:
        """Run short `work` that must not stop half-way. Cancellation propagates after it."""
        return await self.run(lambda _: work())

    async def aclose(self) -> None:
        """Wait for running work and end the threads, without blocking the event loop."""
        with ThreadPoolExecutor(1, "close") as closer:
            await asyncio.get_running_loop().run_in_executor(closer, lambda: self._pool.shutdown(cancel_futures=True))


async def wait_until_done(future: asyncio.Future[T]) -> None:
    """Wait until a future is done, through any number of cancellations."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()
