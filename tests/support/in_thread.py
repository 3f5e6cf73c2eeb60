"""Asynchronous stand-ins for tests, and for what they call, that block."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")
_ENTERED_WITHIN_S = 660.0  # longer than an engine may take to start


@contextmanager
def in_thread(context: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enters the context in an event loop in a thread of its own."""
    entered: Future[T] = Future()
    left = threading.Event()

    async def enter() -> None:
        async with context as value:
            entered.set_result(value)
            await asyncio.to_thread(left.wait)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: asyncio.run(enter()))
        running.add_done_callback(lambda _: entered.cancel())  # unless it was entered
        try:
            yield entered.result(_ENTERED_WITHIN_S)
        finally:
            left.set()
            running.result()  # raises what went wrong there
