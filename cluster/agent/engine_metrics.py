"""The engine's own metrics, read through its agent, so that Prometheus needs neither its port nor a certificate."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from engine.errors import EngineError

FRESH_S = 1.0  # an answer, or its lack, serves all who ask within this time: anybody may ask, and each answer costs


class EngineMetrics:
    """Caches the engine's metrics for FRESH_S; concurrent callers share one request."""

    def __init__(self, ask: Callable[[], Awaitable[bytes]], clock: Callable[[], float] = time.monotonic) -> None:
        """`ask` has a deadline of its own, and raises EngineError."""
        self._ask = ask
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()
        self._found: bytes | EngineError = b""
        self._stale_at = float("-inf")

    async def page(self) -> bytes:
        """Prometheus' text format. Raises EngineError."""
        async with self._one_at_a_time:
            if self._clock() >= self._stale_at:
                try:
                    self._found = await self._ask()
                except EngineError as error:
                    self._found = error
                self._stale_at = self._clock() + FRESH_S
            found = self._found
        if isinstance(found, EngineError):
            raise type(found)(str(found))
        return found
