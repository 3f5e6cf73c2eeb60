"""Body of the hook that bounds how many events per second an engine streams.

Each event costs the engine's HTTP server, one process, some 70 µs of a core. A GPU can generate more tokens per second
than that leaves room for: then answers queue in the server, and the scheduler waits for nobody. So when more tokens
than the bound are streamed per second, an event carries several. First tokens and ends of answers are sent at once.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from typing import Any

EVENTS_VARIABLE = "PRELUDE_ENGINE_EVENTS_PER_S"  # 0: no bound
MOST_TOKENS = 8  # of an event: clients see them as one step of so many
_WINDOW_S = 0.25


def stream_in_bounds(original, streamer, reqs, *args, **kwargs):
    """Before a batch's tokens are sent, set how many of them make an event; the rest waits in its request."""
    streamed = [req for req in reqs if req.stream]
    tokens = _pace().tokens_per_event(len(streamed))
    for req in streamed:
        req.sampling_params.stream_interval = tokens
    return original(streamer, reqs, *args, **kwargs)


class EventPace:
    """Tokens per event, from the rate at which tokens were streamed in the last quarter of a second."""

    def __init__(self, events_per_s: int, now: Callable[[], float] = time.monotonic) -> None:
        self._events_per_s = events_per_s
        self._now = now
        self._began_at = now()
        self._tokens = 0
        self._tokens_per_event = 1

    def tokens_per_event(self, num_tokens: int) -> int:
        """Count so many tokens, one of each request, and return the number for their events."""
        if not self._events_per_s:
            return 1
        self._tokens += num_tokens
        elapsed_s = self._now() - self._began_at
        if elapsed_s >= _WINDOW_S:
            needed = math.ceil(self._tokens / elapsed_s / self._events_per_s)
            self._tokens_per_event = min(MOST_TOKENS, max(1, needed))
            self._began_at, self._tokens = self._now(), 0
        return self._tokens_per_event


@functools.cache
def _pace() -> Any:
    return EventPace(int(os.environ.get(EVENTS_VARIABLE) or 0))
