"""Bounds how many uploads run concurrently, in total and per tenant, and lets each clean up at its end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from router.errors import TooManyUploads
from router.identity.access import Principal

T = TypeVar("T")


class UploadSlots:
    """Refuses uploads beyond the limit. It does not queue them, since each takes disk space and a thread.

    A tenant can hold at most half of the slots, but at least one. Principals that cross tenants can hold all.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._max_of_tenant = max(1, max_requests // 2)
        self._num_running = 0
        self._running_of: Counter[str] = Counter()  # by tenant

    @contextmanager
    def slot(self, principal: Principal) -> Iterator[None]:
        """Hold a slot for the block. Raises TooManyUploads if there is none."""
        tenant = principal.tenant
        if self._num_running >= self._max_requests:
            raise TooManyUploads(f"{self._max_requests} uploads are under way, which is the limit; try again")
        if self._running_of[tenant] >= self._max_of_tenant and not principal.crosses_tenants:
            raise TooManyUploads(
                f"{self._running_of[tenant]} uploads of tenant {tenant} are under way; its limit is "
                f"{self._max_of_tenant} at a time: try again when one has ended"
            )
        self._num_running += 1
        self._running_of[tenant] += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._running_of[tenant] -= 1
            if not self._running_of[tenant]:
                del self._running_of[tenant]


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await the end of `work` before a cancellation is raised, because its resources are removed or closed then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
