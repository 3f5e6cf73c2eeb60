"""Turns of tenants at the threads of the catalog: one that asks for much waits for itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.errors import TooManyCatalogCalls


class _Line:
    """One tenant's calls, running and waiting."""

    __slots__ = ("num_calls", "slots")

    def __init__(self, at_once: int) -> None:
        self.num_calls = 0
        self.slots = asyncio.Semaphore(at_once)


class TenantTurns:
    """Lets so many calls of one tenant run at a time; its others wait, first come, first served.

    Each call takes a thread and, while it reads rows, the interpreter: without turns one tenant's pages would keep all
    others' calls waiting, and the event loop, too.
    """

    def __init__(self, at_once: int, *, waiting: int) -> None:
        """`waiting`: calls of one tenant that may wait."""
        self._at_once = at_once
        self._most = at_once + waiting
        self._lines: dict[str, _Line] = {}  # of the tenants that have calls

    @asynccontextmanager
    async def turn(self, tenant: str | None) -> AsyncIterator[None]:
        """Run the block in the tenant's turn; None: at once. Raises TooManyCatalogCalls, at once.

        Each call before it has a deadline, and so has the wait.
        """
        if tenant is None:
            yield
            return
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(self._at_once)
        if line.num_calls >= self._most:
            raise TooManyCatalogCalls(
                f"{line.num_calls} requests of tenant {tenant} ask the catalog, which is the most at a time; try again"
            )
        line.num_calls += 1
        try:
            async with line.slots:
                yield
        finally:
            line.num_calls -= 1
            if not line.num_calls:
                del self._lines[tenant]
