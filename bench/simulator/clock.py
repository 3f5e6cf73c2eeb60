"""Simulated time: an event queue in order of time and, at equal times, of scheduling."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Clock:
    """Simulated seconds and what happens in them."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def __call__(self) -> float:
        return self.now

    def after(self, delay_s: float, event: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), event, arguments))

    def run_until(self, end_s: float) -> None:
        events, pop = self._events, heapq.heappop
        while events and events[0][0] <= end_s:
            self.now, _, event, arguments = pop(events)
            event(*arguments)
        self.now = max(self.now, end_s)

    def run_out(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.run_until(self._events[0][0])
