"""Seconds that the parts of some work take, one after another."""

import time


class Stopwatch:
    """Runs from its creation. `parts` has the seconds of each part, by its name."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._since = time.monotonic()

    def ended(self, part: str) -> None:
        """Note the seconds since the part before this one ended."""
        now = time.monotonic()
        self.parts[part], self._since = round(now - self._since, 3), now
