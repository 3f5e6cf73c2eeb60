"""Body of the hook that bounds how many events per second an engine streams.

Each event costs the engine's HTTP server, one process, some 70 µs of a core. A GPU can generate more tokens per second
than that leaves room for: then answers queue in the server, and the scheduler waits for nobody. So when more tokens
than the bound are streamed per second, an event carries several. First tokens and ends of answers are sent at once.
Engines that decode speculatively are left alone: their steps make several tokens anyway.
"""

import functools
import math
import os
import time
from collections.abc import Callable

EVENTS_VARIABLE = "PRELUDE_ENGINE_EVENTS_PER_S"  # 0: no bound
MOST_TOKENS = 8  # of an event: clients see them as one step of so many
_WINDOW_S = 0.25


def stream_in_bounds(original, streamer, reqs, *args, **kwargs):
    """Before a batch's tokens are sent, set how many of them make an event; the rest waits in its request."""
    pace = _pace()
    if pace is not None and streamer.spec_algorithm.is_none():
        streamed = [req for req in reqs if req.stream]
        tokens = pace.tokens_per_event(len(streamed))
        for req in streamed:
            # None: as the engine's --stream-interval says. What is not sent yet may be a part of a character or the
            # begin of a stop string: then the next token is looked at.
            req.sampling_params.stream_interval = tokens if tokens > 1 and req.send_token_offset else None
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
        self._tokens += num_tokens
        elapsed_s = self._now() - self._began_at
        if elapsed_s >= _WINDOW_S:
            needed = math.ceil(self._tokens / elapsed_s / self._events_per_s)
            self._tokens_per_event = min(MOST_TOKENS, max(1, needed))
            self._began_at, self._tokens = self._now(), 0
        return self._tokens_per_event


@functools.cache
def _pace() -> EventPace | None:
    """This process's; None without a bound."""
    events_per_s = int(os.environ.get(EVENTS_VARIABLE) or 0)
    return EventPace(events_per_s) if events_per_s else None
