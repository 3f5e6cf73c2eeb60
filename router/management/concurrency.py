"""Bounds how many requests of a kind run at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from router.errors import RouterError


class ConcurrencyLimit:
    """Refuses requests beyond the limit. It does not queue them, since each takes disk space and a thread."""

    def __init__(self, max_requests: int, what: str, error: type[RouterError]) -> None:
        self._max_requests = max_requests
        self._what = what
        self._error = error
        self._num_running = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a slot for the block. Raises the error of the limit if there is none."""
        if self._num_running >= self._max_requests:
            raise self._error(f"{self._max_requests} {self._what} are under way, which is the limit; try again")
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
