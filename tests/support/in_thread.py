"""Asynchronous stand-ins for tests, and for what they call, that block."""

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

from anyio.from_thread import start_blocking_portal

T = TypeVar("T")


@contextmanager
def in_thread(context: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enters the context in an event loop in a thread of its own."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(context) as value:
        yield value
